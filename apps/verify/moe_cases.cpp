// moe__*: whole mixtures of experts, forward and backward.
#include "apps/verify/layer_options.h"
#include "apps/verify/module_run.h"
#include "core/model/moe.h"

namespace moesaic::verify {
namespace {

void moe_case(CaseRun& run) {
  const std::int64_t tokens = run.shape("in.x")[0], hidden = run.shape("in.x")[1];
  ModuleRun owner(run);
  MoeLayer module(owner.params(), "", moe_options(run, "", hidden, run.cfg_real("eps")));
  owner.load_weights();
  owner.set_sequence(tokens);
  if (run.is_generated() && run.replays_choices()) module.set_given(run.load_i32("aux.topk"));
  LayerRun layer(owner, module, tokens, hidden);
  run.expect("out.y", layer.forward());
  const MoeLayer::Activations& a = module.activations();
  Tape& tape = layer.tape();
  run.expect_exact("aux.topk", tape.in(a.topk));
  run.expect_exact("aux.counts", tape.in(a.counts));
  run.expect("aux.score", tape.in(a.scores));
  run.expect("aux.weight", tape.in(a.weights));
  // Without a limit every assignment has a row; with one, those that were kept.
  std::vector<std::int64_t> kept;
  for (const double row : run.download(tape.in(a.here[0].row_of_assignment)))
    kept.push_back(row >= 0 ? 1 : 0);
  run.expect_exact("aux.kept", kept);
  run.expect("grad.in.x", layer.backward(run.load("cot.y")));
  owner.expect_gradients("grad.w.");
}

const RegisterFamily moe_family{{"moe__", moe_case}};

}  // namespace
}  // namespace moesaic::verify
