// Attention at the head sizes 128 + 64 / 128: the op, dense and with selected keys, and whole MLA layers with and without
// an indexer of 64 heads of 128.
#include "kernels/ops/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "apps/verify/case_run.h"
#include "apps/verify/large/case_builder.h"
#include "core/base/random.h"
#include "kernels/ops/sparse_mla.h"

namespace moesaic::verify {
namespace {

constexpr std::int64_t kOwn = 128, kShared = 64, kValue = 128;

void run_attention(CaseRun& run) {
  const DType compute = run.precision().compute, stats = run.precision().stats;
  const TensorView q = run.load("in.q"), kvb = run.load("in.kvb"), d_o = run.load("cot.o");
  const TensorView kr = run.has("in.kr") ? run.load("in.kr") : TensorView();
  const TensorView selected = run.has("in.selected") ? run.load_i32("in.selected") : TensorView();
  const TensorView cu = run.load_i32("in.cu");
  const std::int64_t heads = q.dim(1);
  const double scale = 1.0 / std::sqrt(static_cast<double>(q.dim(2)));
  const TensorView o = run.poisoned(d_o.shape(), stats),
                   lse = run.poisoned({heads, q.dim(0)}, stats),
                   largest = run.poisoned({heads}, stats);
  moesaic::run(run.backend(),
               AttentionForward{.o = o,
                                .lse = lse,
                                .max_logit = largest,
                                .q = q,
                                .kvb = kvb,
                                .kr = kr,
                                .cu_seqlens = cu,
                                .selected = selected,
                                .scale = scale,
                                .accumulate_max = false});
  run.expect("out.o", o);
  run.expect("aux.lse", lse);
  run.expect("aux.max_logit", largest);
  const TensorView dq = run.poisoned(q.shape(), compute), dkvb = run.poisoned(kvb.shape(), compute);
  const TensorView dkr = kr.empty() ? TensorView() : run.poisoned(kr.shape(), compute);
  moesaic::run(run.backend(),
               AttentionBackward{.dq = dq,
                                 .dkvb = dkvb,
                                 .dkr = dkr,
                                 .d_o = d_o,
                                 .o = o,
                                 .lse = lse,
                                 .q = q,
                                 .kvb = kvb,
                                 .kr = kr,
                                 .cu_seqlens = cu,
                                 .selected = selected,
                                 .scale = scale});
  run.expect("grad.in.q", dq);
  run.expect("grad.in.kvb", dkvb);
  if (!kr.empty()) run.expect("grad.in.kr", dkr);
}

void run_sparse_mla(CaseRun& run) {
  const DType compute = run.precision().compute, stats = run.precision().stats;
  const TensorView q = run.load("in.q"), kv = run.load("in.kv"), d_o = run.load("cot.o");
  const TensorView selected = run.load_i32("in.selected"), cu = run.load_i32("in.cu");
  const double scale = 1.0 / std::sqrt(static_cast<double>(kOwn + kShared));
  const TensorView o = run.poisoned(d_o.shape(), compute),
                   lse = run.poisoned({q.dim(1), q.dim(0)}, stats),
                   largest = run.poisoned({q.dim(1)}, stats);
  moesaic::run(run.backend(),
               SparseMlaForward{.o = o,
                                .lse = lse,
                                .max_logit = largest,
                                .q = q,
                                .kv = kv,
                                .cu_seqlens = cu,
                                .selected = selected,
                                .scale = scale,
                                .accumulate_max = false});
  run.expect("out.o", o);
  run.expect("aux.lse", lse);
  run.expect("aux.max_logit", largest);
  const TensorView dq = run.poisoned(q.shape(), compute), dkv = run.poisoned(kv.shape(), compute);
  moesaic::run(run.backend(),
               SparseMlaBackward{.dq = dq,
                                 .dkv = dkv,
                                 .d_o = d_o,
                                 .o = o,
                                 .lse = lse,
                                 .q = q,
                                 .kv = kv,
                                 .cu_seqlens = cu,
                                 .selected = selected,
                                 .scale = scale});
  run.expect("grad.in.q", dq);
  run.expect("grad.in.kv", dkv);
}

const RegisterFamily family{{"attention__", run_attention}};
const RegisterFamily sparse_mla_family{{"sparse_mla__", run_sparse_mla}};

/// Per query `k` keys of its document, ascending, -1 where it sees fewer; every third query sees only its own token.
std::vector<std::int64_t> selection(const std::vector<std::int64_t>& cu, std::int64_t k) {
  std::vector<std::int64_t> selected;
  for (std::size_t d = 1; d < cu.size(); ++d) {
    for (std::int64_t t = cu[d - 1]; t < cu[d]; ++t) {
      std::vector<std::int64_t> keys;
      const std::int64_t step = std::max<std::int64_t>(1, (t - cu[d - 1] + 1) / k);
      for (std::int64_t s = t; s >= cu[d - 1] && static_cast<std::int64_t>(keys.size()) < k;
           s -= 1 + static_cast<std::int64_t>(2 * static_cast<double>(step) *
                                              uniform(7, static_cast<std::uint64_t>(s + 977 * t))))
        keys.insert(keys.begin(), s);
      if (t % 3 == 0) keys = {t};
      keys.resize(static_cast<std::size_t>(k), -1);
      selected.insert(selected.end(), keys.begin(), keys.end());
    }
  }
  return selected;
}

struct AttentionSize {
  std::vector<std::int64_t> cu;
  std::int64_t heads = 2, shared = kShared, selected = 0;
  std::int64_t queries = 0;  ///< the last so many tokens; 0 = all
  double logits = 1;         ///< scale of the queries: large ones give nearly one-hot probabilities
};

void attention(CaseBuilder& b, const AttentionSize& s) {
  const std::int64_t tokens = s.cu.back(), queries = s.queries > 0 ? s.queries : tokens;
  b.ints("in.cu", {static_cast<std::int64_t>(s.cu.size())}, s.cu);
  b.normal("in.q", {queries, s.heads, kOwn + s.shared}, s.logits);
  b.normal("in.kvb", {tokens, s.heads, kOwn + kValue});
  if (s.shared > 0) b.normal("in.kr", {tokens, s.shared});
  if (s.selected > 0) {
    auto selected = selection(s.cu, s.selected);
    selected.erase(selected.begin(), selected.begin() + (tokens - queries) * s.selected);
    b.ints("in.selected", {queries, s.selected}, selected);
  }
  b.normal("cot.o", {queries, s.heads, kValue});
  // Nearly one-hot probabilities leave little of <do, v> - <do, o>, of whose terms o has rounded factors.
  b.accuracy(std::max<std::int64_t>(tokens, 192), s.logits > 1 ? 64 : 4);
  b.expect_path("attention_forward", "tiled");
  b.expect_path("attention_backward", "tiled");
}

struct SparseMlaSize {
  std::vector<std::int64_t> cu;
  std::int64_t heads = 16, selected = 64;
  double logits = 0.3;
};

void sparse_mla(CaseBuilder& b, const SparseMlaSize& s) {
  constexpr std::int64_t kLatent = 512;
  const std::int64_t tokens = s.cu.back();
  b.ints("in.cu", {static_cast<std::int64_t>(s.cu.size())}, s.cu);
  b.normal("in.q", {tokens, s.heads, kLatent + kShared}, s.logits);
  b.normal("in.kv", {tokens, kLatent + kShared});
  b.ints("in.selected", {tokens, s.selected}, selection(s.cu, s.selected));
  b.normal("cot.o", {tokens, s.heads, kLatent});
  // As in attention(): with sharp probabilities little is left of <do, v> - <do, o>, and here o is rounded.
  b.accuracy(std::max<std::int64_t>(tokens, 576), 16);
  b.expect_path("sparse_mla_forward", "tiled");
  b.expect_path("sparse_mla_backward", "tiled");
}

struct MlaSize {
  std::vector<std::int64_t> cu;
  std::int64_t hidden = 256, heads = 2, q_latent = 128, selected = 0, kv_latent = 128;
  bool gate = true, rope = true, sparse = true;
};

void mla(CaseBuilder& b, const MlaSize& s) {
  const std::int64_t tokens = s.cu.back();
  std::string cfg = fmt::format(
      R"({{"heads": {}, "qk_nope": 128, "qk_rope": 64, "v_dim": 128, "kv_lora": {}, "q_lora": {}, "latent_eps": 1e-6,)"
      R"( "gate": {}, "rope_theta": {}, "rope_interleaved": true)",
      s.heads,
      s.kv_latent,
      s.q_latent > 0 ? std::to_string(s.q_latent) : "null",
      s.gate,
      s.rope ? "10000.0" : "null");
  if (s.selected > 0) {
    cfg += fmt::format(
        R"(, "index_heads": 64, "index_dim": 128, "index_rope": 64, "index_eps": 1e-6, "index_topk": {}, "stage": "{}")",
        s.selected,
        s.sparse ? "sparse" : "warmup");
    b.expect_path("indexer_select", "tiled");
    b.expect_path("indexer_loss", "tiled");
    if (s.kv_latent == 512) {
      b.expect_path("sparse_mla_forward", "tiled");
      b.expect_path("sparse_mla_backward", "tiled");
    }
  }
  b.cfg(cfg + "}");
  b.ints("in.cu", {static_cast<std::int64_t>(s.cu.size())}, s.cu);
  b.normal("in.x", {tokens, s.hidden});
  b.normal("cot.y", {tokens, s.hidden});
  b.accuracy(1024, 16, {"indexer."});
  b.expect_path("attention_forward", "tiled");
  b.expect_path("attention_backward", "tiled");
}

}  // namespace

void add_attention_cases(LargeCases& cases) {
  const auto add = [&](const std::string& name, const AttentionSize& size) {
    cases.push_back({"attention__" + name, [size](CaseBuilder& b) { attention(b, size); }});
  };
  for (const std::int64_t tokens : {1, 63, 64, 65, 127, 129, 257, 700})
    add(fmt::format("large_t{}", tokens), {.cu = {0, tokens}});
  add("large_packed", {.cu = {0, 1, 64, 64, 191, 193, 301}, .heads = 3});
  add("large_selected", {.cu = {0, 260}, .selected = 48});
  add("large_selected_packed", {.cu = {0, 100, 100, 163, 299}, .heads = 3, .selected = 33});
  add("large_no_shared_part", {.cu = {0, 65, 194}, .shared = 0});
  add("large_last_queries", {.cu = {0, 70, 301}, .queries = 170});
  add("large_last_queries_selected", {.cu = {0, 70, 301}, .selected = 33, .queries = 170});
  add("large_sharp", {.cu = {0, 160}, .logits = 6});

  const auto add_sparse = [&](const std::string& name, const SparseMlaSize& size) {
    cases.push_back({"sparse_mla__" + name, [size](CaseBuilder& b) { sparse_mla(b, size); }});
  };
  add_sparse("large_h16", {.cu = {0, 190}});
  add_sparse("large_h96_packed", {.cu = {0, 1, 40, 40, 103}, .heads = 96, .selected = 48});
  add_sparse("large_h48_tail", {.cu = {0, 67}, .heads = 48, .selected = 65});
  add_sparse("large_sharp", {.cu = {0, 130}, .heads = 32, .logits = 1});

  const auto add_mla = [&](const std::string& name, const MlaSize& size) {
    cases.push_back({name, [size](CaseBuilder& b) { mla(b, size); }});
  };
  add_mla("mla__large_gated_rope", {.cu = {0, 130}});
  add_mla("mla__large_packed", {.cu = {0, 1, 66, 66, 193}, .heads = 3, .rope = false});
  add_mla("mla__large_direct_query", {.cu = {0, 129}, .q_latent = 0, .gate = false});
  add_mla("dsa__large_sparse", {.cu = {0, 130}, .selected = 32});
  add_mla("dsa__large_sparse_packed", {.cu = {0, 40, 40, 131}, .selected = 17});
  add_mla("dsa__large_gather", {.cu = {0, 131}, .selected = 32, .kv_latent = 512});
  add_mla("dsa__large_warmup", {.cu = {0, 65}, .selected = 16, .sparse = false});
}

}  // namespace moesaic::verify
