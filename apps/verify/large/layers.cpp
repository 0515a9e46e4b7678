// Mixtures of experts, and whole decoder layers under attention residuals.
#include <algorithm>

#include <fmt/format.h>

#include "apps/verify/large/case_builder.h"
#include "apps/verify/layer_options.h"
#include "apps/verify/module_run.h"
#include "core/model/decoder_layer.h"

namespace moesaic::verify {
namespace {

DecoderLayerOptions decoder_options(const CaseRun& run) {
  DecoderLayerOptions o;
  o.hidden = run.cfg_int("d");
  o.eps = run.cfg_real("eps");
  o.is_kda = run.cfg_bool("is_kda");
  o.is_moe = run.cfg_bool("is_moe");
  o.kda = kda_options(run, "kda.", o.hidden, o.eps);
  o.mla = mla_options(run, "mla.", o.hidden);
  if (run.cfg_has("dsa")) o.mla.indexer = indexer_options(run, "dsa.");
  o.moe = moe_options(run, "moe.", o.hidden, o.eps);
  o.dense = {.hidden = o.hidden, .inner = run.cfg_int("inner"), .activation = o.moe.activation};
  o.residual.kind = ResidualKind::attention;
  o.residual.bank_size = run.cfg_int("bank");
  o.residual.attn_starts_block = run.cfg_bool("starts_block");
  return o;
}

void replay_choices(CaseRun& run, DecoderLayer& layer) {
  if (!run.replays_choices()) return;
  if (layer.moe() != nullptr) layer.moe()->set_given(run.load_i32("aux.topk"));
  if (layer.mla() != nullptr && layer.mla()->indexer() != nullptr)
    layer.mla()->indexer()->set_given(run.load_i32("aux.selected"));
}

void expect_choices(CaseRun& run, DecoderLayer& layer, Tape& tape) {
  if (layer.moe() != nullptr)
    run.expect_exact("aux.topk", tape.in(layer.moe()->activations().topk));
  if (layer.mla() != nullptr && layer.mla()->indexer() != nullptr)
    run.expect_exact("aux.selected", tape.in(layer.mla()->indexer()->selected()));
}

void decoder_case(CaseRun& run) {
  const Shape rows = run.shape("in.cur");
  ModuleRun owner(run);
  DecoderLayer layer(owner.params(), "", decoder_options(run));
  owner.load_weights();
  owner.set_sequence(rows[0]);
  replay_choices(run, layer);
  layer.plan({rows[0]}, {});
  Tape tape(layer.tape_spec(),
            run.poisoned({static_cast<std::int64_t>(layer.tape_spec().slot_bytes())}, DType::u8));
  DecoderLayer::Bundle in{run.load("in.cur"), {}};
  const LayerResidual& residual = layer.options().residual;
  for (std::int64_t i = 0; i < residual.bank_size; ++i)
    in.bank.push_back(run.load(fmt::format("in.bank.{}", i)));
  RunContext context = owner.context();
  const DecoderLayer::Bundle out = layer.forward(context, tape, in);
  run.expect("out.cur", out.cur);
  expect_choices(run, layer, tape);

  // The gradients of what leaves the layer become those of what enters it, in place.
  const TensorView dcur = run.upload(run.host_reals("cot.cur"), rows, run.precision().compute);
  std::vector<TensorView> dbank;
  for (std::int64_t i = 0; i < residual.bank_size_after(); ++i)
    dbank.push_back(
        run.upload(run.host_reals(fmt::format("cot.bank.{}", i)), rows, run.precision().stats));
  layer.backward(context, tape, dcur, dbank);
  run.expect("grad.in.cur", dcur);
  for (std::int64_t i = 0; i < residual.bank_size; ++i)
    run.expect(fmt::format("grad.in.bank.{}", i), dbank[static_cast<std::size_t>(i)]);
  owner.expect_gradients("grad.w.");
}

const RegisterFamily family{{"decoder__", decoder_case}};

struct MoeSize {
  std::int64_t tokens, hidden, experts, top_k, inner, latent, shared;
  bool situ;
  std::int64_t capacity = 0;  ///< rows that an expert keeps, the first ones; 0 = all
};

std::string moe_cfg(const MoeSize& s) {
  return fmt::format(
      R"({{"experts": {}, "top_k": {}, "inter": {}, "latent": {}, "shared": {}, "act": "{}", "situ_b1": 4.0,)"
      R"( "situ_b2": 25.0, "route_scale": 2.5, "renorm": true, "eps": 1e-5, "capacity": {}, "drop_policy": "position"}})",
      s.experts,
      s.top_k,
      s.inner,
      s.latent > 0 ? std::to_string(s.latent) : "null",
      s.shared,
      s.situ ? "situ" : "silu",
      s.capacity);
}

// Backward is fused where the second layer's sums are long.
void expect_grouped(CaseBuilder& b, const MoeSize& s) {
  const bool is_long = (s.latent > 0 ? s.latent : s.hidden) >= (s.situ ? 3072 : 2048);
  for (const char* op : {"forward", "backward_input", "backward_weight"})
    b.expect_path(std::string("grouped_linear_") + op, "tiled");
  b.expect_path("grouped_glu_forward", "fused");
  b.expect_path("grouped_glu_backward", is_long ? "fused" : "separate");
  b.expect_path("router_forward", "registers");
}

void moe(CaseBuilder& b, const MoeSize& s) {
  b.cfg(moe_cfg(s));
  b.normal("in.x", {s.tokens, s.hidden});
  b.normal("cot.y", {s.tokens, s.hidden});
  b.accuracy(std::max<std::int64_t>(1024, s.hidden), 16);
  expect_grouped(b, s);
}

struct DecoderSize {
  std::vector<std::int64_t> cu;
  bool is_kda, is_moe, has_indexer, starts_block;
  std::int64_t bank;
};

std::string decoder_cfg(const DecoderSize& s, const MoeSize& experts) {
  return fmt::format(
      R"({{"d": {}, "eps": 1e-5, "is_kda": {}, "is_moe": {}, "inner": 384, "bank": {}, "starts_block": {}, "moe": {},)"
      R"( "kda": {{"kda_heads": 2, "kda_head_dim": 128, "conv": 4, "g_min": -5.0, "full_rank_gate": true}},)"
      R"( "mla": {{"heads": 2, "qk_nope": 128, "qk_rope": 64, "v_dim": 128, "kv_lora": 128, "q_lora": 128,)"
      R"( "latent_eps": 1e-6, "gate": true, "rope_theta": null}}, "dsa": {}}})",
      experts.hidden,
      s.is_kda,
      s.is_moe,
      s.bank,
      s.starts_block,
      moe_cfg(experts),
      s.has_indexer
          ? R"({"index_heads": 64, "index_dim": 128, "index_rope": 0, "index_eps": 1e-6, "index_topk": 24})"
          : "null");
}

void decoder(CaseBuilder& b, const DecoderSize& s) {
  const std::int64_t tokens = s.cu.back();
  const MoeSize experts{tokens, 256, 16, 4, 128, 128, 1, true};
  b.cfg(decoder_cfg(s, experts));
  b.ints("in.cu", {static_cast<std::int64_t>(s.cu.size())}, s.cu);
  const Shape rows{tokens, experts.hidden};
  for (const char* name : {"in.cur", "cot.cur"})
    b.normal(name, rows);
  for (std::int64_t i = 0; i < s.bank + (s.starts_block ? 1 : 0); ++i) {
    if (i < s.bank) b.normal(fmt::format("in.bank.{}", i), rows);
    b.normal(fmt::format("cot.bank.{}", i), rows);
  }
  b.accuracy(1024, 64, {"indexer."});
  const std::string attention = s.is_kda ? "kda_chunk" : "attention";
  b.expect_path(attention + "_forward", "tiled");
  b.expect_path(attention + "_backward", "tiled");
  if (s.has_indexer) b.expect_path("indexer_loss", "tiled");
  if (s.is_moe) expect_grouped(b, experts);
  b.expect_path("attn_res_forward", "one_pass");
}

}  // namespace

void add_layer_cases(LargeCases& cases) {
  const auto add_moe = [&](const std::string& name, const MoeSize& size) {
    cases.push_back({"moe__" + name, [size](CaseBuilder& b) { moe(b, size); }});
  };
  add_moe("large_latent_situ", {131, 256, 16, 4, 192, 128, 2, true});
  add_moe("large_plain_swiglu", {129, 256, 12, 3, 128, 0, 1, false});
  add_moe("large_capacity", {130, 192, 8, 2, 64, 128, 1, true, 24});
  add_moe("large_long_sums", {65, 2048, 4, 2, 72, 0, 0, false});
  add_moe("large_many_experts", {65, 128, 96, 8, 64, 64, 0, true});

  const auto add = [&](const std::string& name, const DecoderSize& size) {
    cases.push_back({"decoder__" + name, [size](CaseBuilder& b) { decoder(b, size); }});
  };
  add("large_kda_dense", {{0, 130}, true, false, false, true, 0});
  add("large_kda_moe", {{0, 65, 65, 193}, true, true, false, false, 2});
  add("large_mla_moe", {{0, 129}, false, true, false, true, 1});
  add("large_sparse_moe", {{0, 30, 130}, false, true, true, false, 1});
}

}  // namespace moesaic::verify
