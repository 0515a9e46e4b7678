// norms__rows and activation__glu: one op each, forward and backward.
#include "apps/verify/case_run.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/gated_norm.h"
#include "kernels/ops/glu.h"
#include "kernels/ops/layer_norm.h"
#include "kernels/ops/rms_norm.h"

namespace moesaic::verify {
namespace {

void run_norms(CaseRun& run) {
  const TensorView x = run.load("in.x"), w = run.load("w.w"), gate = run.load("in.gate");
  const std::int64_t rows = x.dim(0), width = x.dim(1);
  const DType compute = run.precision().compute, stats = run.precision().stats;
  const double eps = run.cfg_real("eps_rms");
  const TensorView dw = run.zeros({width}, run.precision().grad), dx = run.zeros(x.shape(), stats);
  const Shape heads{rows, 1, width};

  const TensorView rms = run.poisoned(x.shape(), compute), inv_rms = run.poisoned({rows}, stats);
  moesaic::run(run.backend(), RmsNormForward{rms, inv_rms, x, w, eps});
  run.expect("out.rms", rms);
  const TensorView l2 = run.poisoned(x.shape(), compute), inv_norm = run.poisoned({rows}, stats);
  moesaic::run(run.backend(),
               L2NormForward{.y = l2, .inv_norm = inv_norm, .x = x, .eps = run.cfg_real("eps_l2")});
  run.expect("out.l2", l2);
  const TensorView gated = run.poisoned(heads, compute), inv_gated = run.poisoned({rows, 1}, stats);
  moesaic::run(
      run.backend(),
      GatedRmsNormForward{gated, inv_gated, x.reshaped(heads), gate.reshaped(heads), w, eps});
  run.expect("out.gated", gated);

  const TensorView part = run.poisoned(x.shape(), compute), dgate = run.poisoned(heads, compute);
  moesaic::run(run.backend(),
               RmsNormBackward{.dx = part,
                               .dweight = dw,
                               .dy = run.load("cot.rms"),
                               .x = x,
                               .weight = w,
                               .inv_rms = inv_rms});
  moesaic::run(run.backend(), Accumulate{dx, part});
  moesaic::run(run.backend(),
               L2NormBackward{.dx = part, .dy = run.load("cot.l2"), .x = x, .inv_norm = inv_norm});
  moesaic::run(run.backend(), Accumulate{dx, part});
  moesaic::run(run.backend(),
               GatedRmsNormBackward{.dx = part.reshaped(heads),
                                    .dgate = dgate,
                                    .dweight = dw,
                                    .dy = run.load("cot.gated").reshaped(heads),
                                    .x = x.reshaped(heads),
                                    .gate = gate.reshaped(heads),
                                    .weight = w,
                                    .inv_rms = inv_gated});
  moesaic::run(run.backend(), Accumulate{dx, part});
  run.expect("grad.in.x", dx);
  run.expect("grad.in.gate", dgate);
  run.expect("grad.w.w", dw);
}

void run_glu(CaseRun& run, const std::string& name, const GluActivation& activation) {
  const std::vector<double> gate = run.host_reals("in." + name + "_gate"),
                            up = run.host_reals("in." + name + "_up");
  const auto n = static_cast<std::int64_t>(gate.size());
  std::vector<double> both = gate;
  both.insert(both.end(), up.begin(), up.end());
  const DType compute = run.precision().compute;
  const TensorView gate_up = run.upload(both, {1, 2 * n}, compute),
                   h = run.poisoned({1, n}, compute);
  moesaic::run(run.backend(), GluForward{.h = h, .gate_up = gate_up, .activation = activation});
  run.expect("out." + name, h);
  const TensorView d = run.poisoned({1, 2 * n}, compute);
  moesaic::run(run.backend(),
               GluBackward{.dgate_up = d,
                           .dh = run.load("cot." + name).reshaped({1, n}),
                           .gate_up = gate_up,
                           .activation = activation});
  const TensorView halves = d.reshaped({2, n});
  run.expect("grad_" + name + ".in." + name + "_gate", halves.rows(0, 1));
  run.expect("grad_" + name + ".in." + name + "_up", halves.rows(1, 2));
}

void run_activations(CaseRun& run) {
  const GluActivation situ{GluKind::situ, run.cfg_real("b1"), run.cfg_real("b2")};
  run_glu(run, "situ", situ);
  run_glu(run, "sat", situ);
  run_glu(run, "swiglu", {});
}

const RegisterFamily norms{{"norms__rows", run_norms}};
const RegisterFamily activations{{"activation__glu", run_activations}};

}  // namespace
}  // namespace moesaic::verify
