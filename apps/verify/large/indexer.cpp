// The indexer's ops at 64 heads of 128: scores, and the loss with its gradients, over all visible and over selected keys.
#include "kernels/ops/indexer.h"

#include <cmath>

#include <fmt/format.h>

#include "apps/verify/case_run.h"
#include "apps/verify/large/case_builder.h"

namespace moesaic::verify {
namespace {

constexpr std::int64_t kHeads = 64, kDim = 128, kOwn = 128, kShared = 64, kValue = 128;

void run_indexer(CaseRun& run) {
  const DType compute = run.precision().compute, stats = run.precision().stats;
  const TensorView qi = run.load("in.qi"), ki = run.load("in.ki"), w = run.load("in.w");
  const TensorView cu = run.load_i32("in.cu");
  const std::int64_t tokens = qi.dim(0), k = run.cfg_int("top_k");
  const TensorView selected = run.poisoned({tokens, k}, DType::i32),
                   scores = run.poisoned({tokens, tokens}, stats);
  moesaic::run(
      run.backend(),
      IndexerSelect{.selected = selected,
                    .scores = scores,
                    .qi = qi,
                    .ki = ki,
                    .w = w,
                    .cu_seqlens = cu,
                    .given = run.replays_choices() ? run.load_i32("aux.selected") : TensorView()});
  run.expect_exact("aux.selected", selected);
  run.expect("out.scores", scores);

  const bool sparse = run.cfg_bool("sparse");
  const TensorView q = run.load("in.q"), kvb = run.load("in.kvb"), kr = run.load("in.kr");
  const std::int64_t heads = q.dim(1);
  const double scale = 1.0 / std::sqrt(static_cast<double>(q.dim(2)));
  const TensorView o = run.poisoned({tokens, heads, kValue}, stats),
                   lse = run.poisoned({heads, tokens}, stats);
  moesaic::run(run.backend(),
               AttentionForward{.o = o,
                                .lse = lse,
                                .max_logit = {},
                                .q = q,
                                .kvb = kvb,
                                .kr = kr,
                                .cu_seqlens = cu,
                                .selected = sparse ? selected : TensorView(),
                                .scale = scale});
  const TensorView kl = run.zeros({1}, stats), dqi = run.poisoned(qi.shape(), compute),
                   dki = run.poisoned(ki.shape(), compute), dw = run.poisoned(w.shape(), compute);
  moesaic::run(run.backend(),
               IndexerLoss{.kl = kl,
                           .dqi = dqi,
                           .dki = dki,
                           .dw = dw,
                           .qi = qi,
                           .ki = ki,
                           .w = w,
                           .q = q,
                           .kvb = kvb,
                           .kr = kr,
                           .lse = lse,
                           .cu_seqlens = cu,
                           .selected = sparse ? selected : TensorView(),
                           .tokens = run.upload({static_cast<double>(tokens)}, {1}, stats),
                           .dn = kOwn,
                           .scale = scale});
  run.expect("out.kl", kl);
  run.expect("grad.in.qi", dqi);
  run.expect("grad.in.ki", dki);
  run.expect("grad.in.w", dw);
}

const RegisterFamily family{{"indexer__", run_indexer}};

void indexer(CaseBuilder& b, const std::vector<std::int64_t>& cu, std::int64_t top_k, bool sparse) {
  const std::int64_t tokens = cu.back(), heads = 2;
  b.cfg(fmt::format(R"({{"top_k": {}, "sparse": {}}})", top_k, sparse));
  b.ints("in.cu", {static_cast<std::int64_t>(cu.size())}, cu);
  b.normal("in.qi", {tokens, kHeads, kDim});
  b.normal("in.ki", {tokens, kDim});
  b.normal("in.w", {tokens, kHeads});
  b.normal("in.q", {tokens, heads, kOwn + kShared});
  b.normal("in.kvb", {tokens, heads, kOwn + kValue});
  b.normal("in.kr", {tokens, kShared});
  b.accuracy(1024, 8, {"grad.in.qi", "grad.in.ki"});
  b.expect_path("indexer_select", "tiled");
  b.expect_path("indexer_loss", "tiled");
}

}  // namespace

void add_indexer_cases(LargeCases& cases) {
  const auto add = [&](const std::string& name,
                       std::vector<std::int64_t> cu,
                       std::int64_t top_k,
                       bool sparse) {
    cases.push_back({"indexer__" + name, [=](CaseBuilder& b) { indexer(b, cu, top_k, sparse); }});
  };
  add("large_dense", {0, 129}, 32, false);
  add("large_dense_packed", {0, 1, 65, 65, 130}, 16, false);
  add("large_selected", {0, 193}, 40, true);
  add("large_selected_packed", {0, 63, 63, 64, 191}, 17, true);
}

}  // namespace moesaic::verify
