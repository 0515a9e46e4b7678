// Cases of the ops that the project exists for: KDA, sparse attention, routing and experts.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "apps/bench/op_cases.h"
#include "core/base/random.h"
#include "kernels/ops/grouped_gemm.h"
#include "kernels/ops/indexer.h"
#include "kernels/ops/kda_chunk.h"
#include "kernels/ops/kda_prepare.h"
#include "kernels/ops/permute.h"
#include "kernels/ops/router.h"

namespace moesaic::bench {

void OpCases::add_kda() {
  if (!wanted("kda")) return;
  struct Sizes {
    std::int64_t tokens, heads, width;
  };
  for (const Sizes s : {Sizes{1024, 5, 32}, {1024, 8, 64}, {1024, 4, 128}}) {
    const Shape shape{s.tokens, s.heads, s.width}, per_head{s.tokens, s.heads};
    const std::string text = fmt::format("{}x{}x{}", s.tokens, s.heads, s.width);
    const double unit = 1 / std::sqrt(static_cast<double>(s.width));
    const TensorView q = random(shape, dtype_, unit), k = random(shape, dtype_, unit),
                     v = activation(shape), cu = documents(s.tokens, 1);
    const TensorView g = random(shape, stats_, 0.02, -0.1),
                     beta = random(per_head, stats_, 0.1, 0.5);
    if (wanted(KdaChunkForward::kName))
      add(KdaChunkForward{.o = activation(shape),
                          .q = q,
                          .k = k,
                          .v = v,
                          .g = g,
                          .beta = beta,
                          .cu_seqlens = cu},
          text);
    if (wanted(KdaChunkBackward::kName)) {
      add(KdaChunkBackward{.dq = activation(shape),
                           .dk = activation(shape),
                           .dv = activation(shape),
                           .dg = statistic(shape),
                           .dbeta = statistic(per_head),
                           .d_o = activation(shape),
                           .q = q,
                           .k = k,
                           .v = v,
                           .g = g,
                           .beta = beta,
                           .cu_seqlens = cu},
          text);
    }
    const TensorView z = activation(shape), logit = activation(per_head),
                     a_log = statistic({s.heads}), bias = statistic({s.heads * s.width});
    const TensorView q_rstd = random(per_head, stats_, 0.01, 1),
                     k_rstd = random(per_head, stats_, 0.01, 1);
    if (wanted(KdaPrepareForward::kName)) {
      add(KdaPrepareForward{.q = activation(shape),
                            .k = activation(shape),
                            .g = statistic(shape),
                            .beta = statistic(per_head),
                            .q_rstd = q_rstd,
                            .k_rstd = k_rstd,
                            .q_raw = activation(shape),
                            .k_raw = activation(shape),
                            .z = z,
                            .beta_logit = logit,
                            .a_log = a_log,
                            .dt_bias = bias,
                            .g_min = -5.0},
          text);
    }
    if (wanted(KdaPrepareBackward::kName)) {
      add(KdaPrepareBackward{.dq_raw = activation(shape),
                             .dk_raw = activation(shape),
                             .dz = activation(shape),
                             .dbeta_logit = activation(per_head),
                             .da_log = statistic({s.heads}),
                             .ddt_bias = statistic({s.heads * s.width}),
                             .dq = activation(shape),
                             .dk = activation(shape),
                             .dg = statistic(shape),
                             .dbeta = statistic(per_head),
                             .q = q,
                             .k = k,
                             .q_rstd = q_rstd,
                             .k_rstd = k_rstd,
                             .z = z,
                             .beta_logit = logit,
                             .a_log = a_log,
                             .dt_bias = bias,
                             .g_min = -5.0},
          text);
    }
  }
}

void OpCases::add_attention() {
  if (!wanted("attention") && !wanted("indexer")) return;
  constexpr std::int64_t kTokens = 1024, kHeads = 8, kNope = 64, kRope = 32, kValue = 64,
                         kIndexHeads = 4, kIndexWidth = 64, kSelected = 256;
  const TensorView q = activation({kTokens, kHeads, kNope + kRope}),
                   kvb = activation({kTokens, kHeads, kNope + kValue}),
                   kr = activation({kTokens, kRope});
  const TensorView cu = documents(kTokens, 1), o = random({kTokens, kHeads, kValue}, stats_, 0.1),
                   lse = random({kHeads, kTokens}, stats_, 0.1, 8);
  const TensorView selected = memory({kTokens, kSelected}, DType::i32);
  for (std::int64_t t = 0; t < kTokens;
       ++t) {  // all keys while there are few, then every (t / 256)-th one, ascending
    const std::int64_t keys = std::min(t + 1, kSelected);
    for (std::int64_t i = 0; i < kSelected; ++i)
      selected.as<std::int32_t>()[t * kSelected + i] =
          static_cast<std::int32_t>(i < keys ? i * (t + 1) / keys : -1);
  }
  const TensorView qi = activation({kTokens, kIndexHeads, kIndexWidth}),
                   ki = activation({kTokens, kIndexWidth}), w = activation({kTokens, kIndexHeads});
  for (const bool sparse : {false, true}) {
    const ConstTensorView keys = sparse ? ConstTensorView(selected) : ConstTensorView();
    const std::string text = sparse ? "1024x8, 256 keys" : "1024x8, all keys";
    const double scale = 0.1;
    if (wanted(AttentionForward::kName))
      add(AttentionForward{.o = o,
                           .lse = lse,
                           .q = q,
                           .kvb = kvb,
                           .kr = kr,
                           .cu_seqlens = cu,
                           .selected = keys,
                           .scale = scale},
          text);
    if (wanted(AttentionBackward::kName)) {
      add(AttentionBackward{.dq = activation(q.shape()),
                            .dkvb = activation(kvb.shape()),
                            .dkr = activation(kr.shape()),
                            .d_o = activation(o.shape()),
                            .o = o,
                            .lse = lse,
                            .q = q,
                            .kvb = kvb,
                            .kr = kr,
                            .cu_seqlens = cu,
                            .selected = keys,
                            .scale = scale},
          text);
    }
    if (wanted(IndexerLoss::kName)) {
      add(IndexerLoss{.kl = statistic({1}),
                      .dqi = activation(qi.shape()),
                      .dki = activation(ki.shape()),
                      .dw = activation(w.shape()),
                      .qi = qi,
                      .ki = ki,
                      .w = w,
                      .q = q,
                      .kvb = kvb,
                      .kr = kr,
                      .lse = lse,
                      .cu_seqlens = cu,
                      .selected = keys,
                      .dn = kNope,
                      .scale = scale},
          text);
    }
  }
  if (wanted(IndexerSelect::kName)) {
    add(IndexerSelect{.selected = memory({kTokens, kSelected}, DType::i32),
                      .qi = qi,
                      .ki = ki,
                      .w = w,
                      .cu_seqlens = cu},
        "1024 queries, 256 keys");
  }
}

void OpCases::add_routing() {
  constexpr std::int64_t kTokens = 1024, kExperts = 16, kChoices = 4, kRows = kTokens * kChoices,
                         kLatent = 256, kInner = 384;
  const Shape all{kTokens, kExperts}, chosen{kTokens, kChoices};
  const TensorView topk = memory(chosen, DType::i32), offsets = memory({kExperts + 1}, DType::i32),
                   token_of_row = memory({kRows}, DType::i32);
  const TensorView row_of_assignment = memory(chosen, DType::i32),
                   slots = memory({kExperts}, DType::i32);
  // Token t goes to four neighbouring experts from a random one on; rows sorted by expert, as DispatchPlan would.
  std::vector<std::vector<std::int32_t>> rows(kExperts);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    const auto first = static_cast<std::int64_t>(
        uniform(hash_name("bench routing"), static_cast<std::uint64_t>(t)) * kExperts);
    for (std::int64_t j = 0; j < kChoices; ++j) {
      const std::int64_t e = (first + j) % kExperts;
      topk.as<std::int32_t>()[t * kChoices + j] = static_cast<std::int32_t>(e);
      rows[static_cast<std::size_t>(e)].push_back(static_cast<std::int32_t>(t * kChoices + j));
    }
  }
  std::int32_t row = 0;
  for (std::int64_t e = 0; e < kExperts; ++e) {
    offsets.as<std::int32_t>()[e] = row;
    slots.as<std::int32_t>()[e] = static_cast<std::int32_t>(e);
    for (const std::int32_t assignment : rows[static_cast<std::size_t>(e)]) {
      token_of_row.as<std::int32_t>()[row] = assignment / static_cast<std::int32_t>(kChoices);
      row_of_assignment.as<std::int32_t>()[assignment] = row++;
    }
  }
  offsets.as<std::int32_t>()[kExperts] = row;
  if (wanted("router")) {
    const TensorView scores = random(all, stats_, 0.1, 0.5),
                     weights = random(chosen, stats_, 0.01, 0.25), logits = statistic(all);
    add(RouterForward{.scores = statistic(all),
                      .topk = memory(chosen, DType::i32),
                      .weights = statistic(chosen),
                      .cutoff = statistic({kTokens}),
                      .counts = memory({kExperts}, DType::i32),
                      .logits = logits,
                      .bias = random({kExperts}, stats_, 0.1)},
        "1024x16, top 4");
    add(RouterBackward{.dlogits = statistic(all),
                       .dweights = statistic(chosen),
                       .logits = logits,
                       .scores = scores,
                       .weights = weights,
                       .topk = topk},
        "1024x16, top 4");
  }
  if (wanted(DispatchPlan::kName)) {
    add(DispatchPlan{.offsets = memory({kExperts + 1}, DType::i32),
                     .row_of_assignment = memory(chosen, DType::i32),
                     .token_of_row = memory({kRows}, DType::i32),
                     .topk = topk},
        "1024x16, top 4");
  }
  const TensorView x = activation({kRows, kLatent}),
                   w = activation({kExperts, 2 * kInner, kLatent}),
                   y = activation({kRows, 2 * kInner});
  const TensorView tokens = activation({kTokens, kLatent});
  if (wanted(GatherRows::kName))
    add(dispatch_rows(activation(x.shape()), tokens, token_of_row, offsets), "4096x256");
  if (wanted(CombineRows::kName))
    add(combine_rows(activation(tokens.shape()), x, statistic(chosen), row_of_assignment),
        "4096x256 to 1024x256");
  if (!wanted("grouped_linear")) return;
  const std::string text = "16 experts, 4096x768x256";
  add(
      GroupedLinearForward{
          .y = activation(y.shape()), .x = x, .w = w, .offsets = offsets, .slot_of_expert = slots},
      text);
  add(GroupedLinearBackwardInput{.dx = activation(x.shape()),
                                 .dy = y,
                                 .w = w,
                                 .offsets = offsets,
                                 .slot_of_expert = slots},
      text);
  add(
      GroupedLinearBackwardWeight{
          .dw = statistic(w.shape()), .dy = y, .x = x, .offsets = offsets, .slot_of_expert = slots},
      text);
}

}  // namespace moesaic::bench
