// kda_layer__*, mla__*, dsa__*: whole attention layers, forward and backward.
#include "apps/verify/layer_options.h"
#include "apps/verify/module_run.h"
#include "core/model/kda_attention.h"
#include "core/model/mla_attention.h"

namespace moesaic::verify {
namespace {

void kda_case(CaseRun& run) {
  // The norm after a nearly empty state amplifies rounding: in f32 the gradients of the first
  // tokens are off by 25 units of roundoff, in bf16 by as many of its own.
  if (!run.is_generated()) run.scale_limit(1, 4);
  const std::int64_t tokens = run.shape("in.x")[0], hidden = run.shape("in.x")[1];
  ModuleRun owner(run);
  KdaAttention module(owner.params(), "", kda_options(run, "", hidden, run.cfg_real("eps")));
  owner.load_weights();
  owner.set_sequence(tokens);
  LayerRun layer(owner, module, tokens, hidden);
  run.expect("out.y", layer.forward());
  run.expect("grad.in.x", layer.backward(run.load("cot.y")));
  owner.expect_gradients("grad.w.");
}

void mla_case(CaseRun& run) {
  const std::int64_t tokens = run.shape("in.x")[0], hidden = run.shape("in.x")[1];
  ModuleRun owner(run);
  MlaAttention module(owner.params(), "", mla_options(run, "", hidden));
  owner.load_weights();
  owner.set_sequence(tokens);
  LayerRun layer(owner, module, tokens, hidden);
  run.expect("out.y", layer.forward());
  run.expect("aux.lse", layer.tape().in(module.lse()));
  run.expect("aux.max_logit", owner.params().buffer(module.max_logit()));
  run.expect("grad.in.x", layer.backward(run.load("cot.y")));
  owner.expect_gradients("grad.w.");
}

/// aux.kept [T, T]: which keys every query attends to; from the selection, or all visible ones in
/// the warm-up stage.
std::vector<std::int64_t> kept_keys(CaseRun& run,
                                    ModuleRun& owner,
                                    const std::vector<double>& selected,
                                    bool sparse) {
  const std::int64_t tokens = run.shape("in.x")[0], k = run.shape("aux.topk")[1];
  std::vector<std::int64_t> kept(static_cast<std::size_t>(tokens * tokens), 0);
  const auto keep = [&](std::int64_t t, std::int64_t s) {
    kept[static_cast<std::size_t>(t * tokens + s)] = 1;
  };
  const auto& borders = owner.borders();
  for (std::size_t d = 1; d < borders.size(); ++d) {
    for (std::int64_t t = borders[d - 1]; t < borders[d]; ++t) {
      for (std::int64_t s = borders[d - 1]; !sparse && s <= t; ++s)
        keep(t, s);
      for (std::int64_t j = 0; sparse && j < k; ++j) {
        const auto s = static_cast<std::int64_t>(selected[static_cast<std::size_t>(t * k + j)]);
        if (s >= 0) keep(t, s);
      }
    }
  }
  return kept;
}

/// One forward and backward pass with the indexer's loss weighted by `kl_weight`; `report` sees the
/// layer in between.
struct DsaRun {
  DsaRun(CaseRun& run, double kl_weight, SparseForm form) : owner(run) {
    const std::int64_t tokens = run.shape("in.x")[0], hidden = run.shape("in.x")[1];
    MlaOptions options = mla_options(run, "", hidden);
    options.indexer = indexer_options(run, "");
    options.indexer->kl_weight = kl_weight;
    options.indexer->form = form;
    module = std::make_unique<MlaAttention>(owner.params(), "", options);
    module->set_sparse(run.cfg_text("stage") == "sparse");
    owner.load_weights();
    owner.set_sequence(tokens);
    scores = run.poisoned({tokens, tokens}, run.precision().stats);
    module->indexer()->set_scores(scores);
    // Scores of golden cases are 5e-3 from a tie, nearer than bf16 can tell: there the stored choice is replayed.
    if (run.replays_choices()) module->indexer()->set_given(run.load_i32("aux.topk"));
    layer = std::make_unique<LayerRun>(owner, *module, tokens, hidden);
  }
  ModuleRun owner;
  std::unique_ptr<MlaAttention> module;
  std::unique_ptr<LayerRun> layer;
  TensorView scores;
};

void dsa_form(CaseRun& run, SparseForm form) {
  const bool sparse = run.cfg_text("stage") == "sparse";
  DsaRun main(run, 0.0, form);
  run.expect("out.y", main.layer->forward());
  const ConstTensorView selected = main.layer->tape().in(main.module->indexer()->selected());
  run.expect_exact("aux.topk", selected);
  run.expect_exact("aux.kept", kept_keys(run, main.owner, run.download(selected), sparse));
  run.expect("aux.index_score", main.scores);
  // Without the indexer's objective: its weights get nothing.
  run.expect("grad.in.x", main.layer->backward(run.load("cot.y")));
  main.owner.expect_gradients("grad.w.");

  // The objective alone, through a cotangent of zero: nothing else gets a gradient.
  DsaRun alone(run, 1.0, form);
  alone.layer->forward();
  const TensorView dx =
      alone.layer->backward(run.zeros(run.shape("cot.y"), run.precision().compute));
  run.expect("aux.kl", {alone.owner.loss(Loss::indexer_kl)});
  alone.owner.expect_gradients("gradkl.w.", "indexer.");
  alone.owner.expect_no_gradient_outside("indexer.");
  for (const double v : run.download(dx)) {
    if (v != 0.0) return run.fail("the indexer's objective reaches the layer's input");
  }
}

// A selection is attended to in both forms: masked, and gathered from the latent.
void dsa_case(CaseRun& run) {
  dsa_form(run, SparseForm::masked);
  if (run.cfg_text("stage") == "sparse" && run.report_again("gather"))
    dsa_form(run, SparseForm::gather);
}

const RegisterFamily kda_family{{"kda_layer__", kda_case}};
const RegisterFamily mla_family{{"mla__", mla_case}};
const RegisterFamily dsa_family{{"dsa__", dsa_case}};

}  // namespace
}  // namespace moesaic::verify
