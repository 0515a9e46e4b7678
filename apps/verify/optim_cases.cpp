// optim__steps, optim__heads_clip_schedule: AdamW, Muon, QK-clip, gradient clipping, learning
// rates.
#include <fmt/format.h>

#include "apps/verify/case_run.h"
#include "core/train/lr_schedule.h"
#include "kernels/ops/adamw.h"
#include "kernels/ops/clip.h"
#include "kernels/ops/muon.h"
#include "kernels/ops/qk_clip.h"

namespace moesaic::verify {
namespace {

TensorView upload_scalars(CaseRun& run, const StepScalars& scalars) {
  std::vector<double> host(kNumStepScalars);
  scalars.write(
      TensorView(reinterpret_cast<std::byte*>(host.data()), DType::f64, {kNumStepScalars}));
  return run.upload(host, {kNumStepScalars}, run.precision().master);
}

TensorView copy_of(CaseRun& run, const std::string& name) {
  return run.upload(run.host_reals(name), run.shape(name), run.precision().master);
}

/// Gradients of all steps, [steps, rows, cols]; the view of one.
ConstTensorView gradient(CaseRun& run, const std::string& name, std::int64_t step) {
  const auto all = run.load(name, run.precision().grad);
  return all.rows(step, step + 1).reshaped({all.dim(1), all.dim(2)});
}

void adamw_steps(CaseRun& run, const std::string& id) {
  const DType master = run.precision().master;
  const TensorView w = copy_of(run, "in.w." + id), m = run.zeros(w.shape(), master),
                   v = run.zeros(w.shape(), master);
  const auto betas = run.cfg_reals("betas");
  for (std::int64_t step = 0; step < run.cfg_int("steps"); ++step) {
    StepScalars s;
    s.learning_rate = run.cfg_real("lr");
    s.bias_correction1 = bias_correction(betas[0], static_cast<double>(step + 1));
    s.bias_correction2 = bias_correction(betas[1], static_cast<double>(step + 1));
    moesaic::run(run.backend(),
                 AdamW{.w = w,
                       .m = m,
                       .v = v,
                       .w_compute = {},
                       .dw = gradient(run, "in.g." + id, step),
                       .scalars = upload_scalars(run, s),
                       .weight_decay = run.cfg_real("wd"),
                       .beta1 = betas[0],
                       .beta2 = betas[1],
                       .eps = run.cfg_real("eps")});
  }
  run.expect("out.adamw." + id, w);
  run.expect("aux.adam_m." + id, m);
  run.expect("aux.adam_v." + id, v);
}

/// Runs `steps` Muon updates of in.w<id> with in.g<id>; returns weight and momentum.
std::pair<TensorView, TensorView> muon_steps(CaseRun& run,
                                             const std::string& id,
                                             std::int64_t steps,
                                             bool nesterov,
                                             const std::vector<RowBlock>& blocks) {
  const TensorView w = copy_of(run, "in.w" + id),
                   momentum = run.zeros(w.shape(), run.precision().master);
  StepScalars s;
  s.learning_rate = run.cfg_real("lr");
  for (std::int64_t step = 0; step < steps; ++step) {
    moesaic::run(run.backend(),
                 MuonUpdate{.w = w,
                            .momentum = momentum,
                            .w_compute = {},
                            .dw = gradient(run, "in.g" + id, step),
                            .scalars = upload_scalars(run, s),
                            .blocks = blocks,
                            .weight_decay = run.cfg_real("wd"),
                            .mu = run.cfg_real("mu"),
                            .nesterov = nesterov});
  }
  return {w, momentum};
}

void steps_case(CaseRun& run) {
  for (std::int64_t i = 0; run.has(fmt::format("in.w.{}", i)); ++i) {
    const std::string id = fmt::format("{}", i);
    adamw_steps(run, id);
    const auto [w, momentum] = muon_steps(run, "." + id, run.cfg_int("steps"), true, {});
    run.expect("out.muon." + id, w);
    run.expect("aux.muon_M." + id, momentum);
    run.expect("out.muon_plain." + id,
               muon_steps(run, "." + id, run.cfg_int("steps"), false, {}).first);
    const auto first = run.download(gradient(run, "in.g." + id, 0));
    const TensorView x = run.upload(first, w.shape(), run.precision().master);
    moesaic::run(
        run.backend(),
        NewtonSchulz{
            .x = x, .blocks = {}, .num_iterations = static_cast<int>(run.cfg_int("ns_steps"))});
    run.expect("aux.ns." + id, x);
  }
}

void clip_part(CaseRun& run) {
  const DType grad = run.precision().grad;
  const TensorView partials = run.poisoned({2}, DType::f64), norm = run.poisoned({1}, DType::f64);
  const TensorView scalars = upload_scalars(run, {});
  moesaic::run(run.backend(),
               SumOfSquares{.partials = partials.rows(0, 1), .x = run.load("in.clip_a", grad)});
  moesaic::run(run.backend(),
               SumOfSquares{.partials = partials.rows(1, 2), .x = run.load("in.clip_b", grad)});
  moesaic::run(run.backend(),
               ClipFactor{.scalars = scalars, .norm = norm, .partials = partials, .limit = 1.0});
  run.expect("out.clip_norm", norm);
  // The optimizers multiply by the factor; here it is applied by hand.
  const double factor =
      run.download(scalars)[static_cast<std::size_t>(index_of(StepScalar::clip_factor))];
  for (const char* name : {"clip_a", "clip_b"}) {
    auto g = run.host_reals(fmt::format("in.{}", name));
    for (double& v : g)
      v *= factor;
    run.expect(fmt::format("out.{}", name), g);
  }
}

void qk_clip_part(CaseRun& run) {
  const DType master = run.precision().master;
  const TensorView q = copy_of(run, "in.q_b"), kv = copy_of(run, "in.kv_b"),
                   gamma = run.poisoned(run.shape("in.max_logit"), master);
  moesaic::run(run.backend(),
               QkClip{.q_weight = q,
                      .kv_b_weight = kv,
                      .gamma = gamma,
                      .max_logit = run.load("in.max_logit", master),
                      .skip = {},
                      .dn = run.cfg_int("dn"),
                      .dr = run.cfg_int("dr"),
                      .dv = run.cfg_int("dv"),
                      .tau = run.cfg_real("tau")});
  run.expect("out.q_b", q);
  run.expect("out.kv_b", kv);
  run.expect("out.gamma", gamma);
}

void schedule_part(CaseRun& run) {
  LrSchedule s{.peak = run.cfg_real("peak"),
               .floor = run.cfg_real("floor"),
               .warmup_steps = run.cfg_int("warmup"),
               .total_steps = run.cfg_int("total"),
               .decay_steps = run.cfg_int("decay")};
  const auto expect_table = [&](const std::string& name) {
    s.check();
    std::vector<double> table;
    for (std::int64_t step = 1; step <= s.total_steps; ++step)
      table.push_back(s.at(step));
    run.expect(name, table);
  };
  s.kind = LrSchedule::Kind::cosine;
  expect_table("out.lr_cosine");
  s.kind = LrSchedule::Kind::wsd;
  for (const char* shape : {"linear", "cosine", "1-sqrt"}) {
    s.shape = lr_decay_shape_from_name(shape);
    expect_table(fmt::format("out.lr_wsd_{}", shape));
  }
}

void heads_clip_schedule_case(CaseRun& run) {
  const auto blocks = head_row_blocks(run.cfg_int("H"), {run.cfg_int("dh")});
  run.expect("out.w", muon_steps(run, "", run.shape("in.g")[0], true, blocks).first);
  clip_part(run);
  qk_clip_part(run);
  schedule_part(run);
}

const RegisterFamily steps_family{{"optim__steps", steps_case}};
const RegisterFamily heads_family{{"optim__heads_clip_schedule", heads_clip_schedule_case}};

}  // namespace
}  // namespace moesaic::verify
