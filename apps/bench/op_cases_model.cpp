// Cases of the ops that the project exists for: KDA, sparse attention, routing and experts.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "apps/bench/op_cases.h"
#include "core/base/random.h"
#include "kernels/ops/grouped_gemm.h"
#include "kernels/ops/grouped_glu.h"
#include "kernels/ops/indexer.h"
#include "kernels/ops/kda_chunk.h"
#include "kernels/ops/kda_prepare.h"
#include "kernels/ops/permute.h"
#include "kernels/ops/router.h"
#include "kernels/ops/sparse_mla.h"

namespace moesaic::bench {

void OpCases::add_kda() {
  kda({1024, 5, 32});
  kda({1024, 8, 64});
  kda({1024, 4, 128});
}

void OpCases::kda(const KdaSizes& s) {
  if (!wanted("kda")) return;
  {
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
  AttentionSizes s{.tokens = 1024,
                   .heads = 8,
                   .nope = 64,
                   .rope = 32,
                   .value = 64,
                   .index_heads = 4,
                   .index_width = 64};
  attention(s);
  s.selected = 256;
  attention(s);
  sparse_mla({.tokens = 1024, .heads = 8, .latent = 128, .rope = 32, .selected = 256});
}

void OpCases::attention(const AttentionSizes& s) {
  if (!wanted("attention") && !wanted("indexer")) return;
  const TensorView q = activation({s.tokens, s.heads, s.nope + s.rope}),
                   kvb = activation({s.tokens, s.heads, s.nope + s.value}),
                   kr = activation({s.tokens, s.rope});
  const TensorView cu = documents(s.tokens, s.documents),
                   o = random({s.tokens, s.heads, s.value}, stats_, 0.1),
                   lse = random({s.heads, s.tokens}, stats_, 0.1, 8);
  ConstTensorView keys;
  const std::int64_t length = s.tokens / s.documents;
  if (s.selected > 0) keys = selection(s.tokens, s.documents, s.selected);
  const TensorView qi = activation({s.tokens, s.index_heads, s.index_width}),
                   ki = activation({s.tokens, s.index_width}),
                   w = activation({s.tokens, s.index_heads});
  const std::string text =
      fmt::format("{} of {}, {} heads, {}",
                  s.documents,
                  length,
                  s.heads,
                  s.selected > 0 ? fmt::format("{} keys", s.selected) : std::string("all keys"));
  const double scale = 1 / std::sqrt(static_cast<double>(s.nope + s.rope));
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
  if (wanted(IndexerLoss::kName) && s.index_heads > 0) {
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
                    .dn = s.nope,
                    .scale = scale},
        text);
  }
  if (wanted(IndexerSelect::kName) && s.selected > 0 && s.index_heads > 0) {
    add(IndexerSelect{.selected = memory({s.tokens, s.selected}, DType::i32),
                      .qi = qi,
                      .ki = ki,
                      .w = w,
                      .cu_seqlens = cu},
        text);
  }
}

TensorView OpCases::selection(std::int64_t tokens, std::int64_t documents, std::int64_t selected) {
  const std::int64_t length = tokens / documents;
  std::vector<std::int32_t> host(static_cast<std::size_t>(tokens * selected), -1);
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t first = t / length * length, visible = t - first + 1,
                       chosen = std::min(visible, selected);
    for (std::int64_t i = 0; i < chosen; ++i)
      host[static_cast<std::size_t>(t * selected + i)] =
          static_cast<std::int32_t>(first + i * visible / chosen);
  }
  return upload(host, {tokens, selected});
}

void OpCases::sparse_mla(const SparseMlaSizes& s) {
  if (!wanted("sparse_mla")) return;
  const TensorView q = activation({s.tokens, s.heads, s.latent + s.rope}),
                   kv = activation({s.tokens, s.latent + s.rope}),
                   o = random({s.tokens, s.heads, s.latent}, dtype_, 0.1),
                   lse = random({s.heads, s.tokens}, stats_, 0.1, 8), cu = documents(s.tokens, 1),
                   keys = selection(s.tokens, 1, s.selected);
  // Of queries that random numbers make longer than a model's.
  const double scale = 0.2 / std::sqrt(static_cast<double>(s.latent + s.rope));
  const std::string text = fmt::format("1 of {}, {} heads, {} keys", s.tokens, s.heads, s.selected);
  // First, so that the backward finds the output and the log-sum-exp that belong to its inputs.
  add(
      SparseMlaForward{
          .o = o, .lse = lse, .q = q, .kv = kv, .cu_seqlens = cu, .selected = keys, .scale = scale},
      text);
  SparseMlaBackward backward{.dq = activation(q.shape()),
                             .dkv = activation(kv.shape()),
                             .d_o = activation(o.shape()),
                             .o = o,
                             .lse = lse,
                             .q = q,
                             .kv = kv,
                             .cu_seqlens = cu,
                             .selected = keys,
                             .scale = scale};
  add(backward, text + ", integer");
  backward.key_sums = KeySums::float_atomics;
  if (s.float_atomics) add(backward, text + ", floats");
}

void OpCases::add_routing() {
  routing({.tokens = 1024, .experts = 16, .choices = 4, .latent = 256, .inner = 384});
  if (wanted("grouped_linear")) grouped(16, 256, 256, 768);
  grouped_glu(16, 256, 256, 384, true);
}

void OpCases::routing(const RoutingSizes& s) {
  const std::int64_t rows_in_all = s.tokens * s.choices;
  const Shape all{s.tokens, s.experts}, chosen{s.tokens, s.choices};
  // Token t goes to neighbouring experts from a random one on; rows sorted by expert, as DispatchPlan would.
  std::vector<std::int32_t> choice(static_cast<std::size_t>(rows_in_all)), row_of(choice.size()),
      token_of(choice.size()), offset;
  std::vector<std::vector<std::int32_t>> rows(static_cast<std::size_t>(s.experts));
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    const auto first = static_cast<std::int64_t>(
        uniform(hash_name("bench routing"), static_cast<std::uint64_t>(t)) *
        static_cast<double>(s.experts));
    for (std::int64_t j = 0; j < s.choices; ++j) {
      const std::int64_t e = (first + j) % s.experts, assignment = t * s.choices + j;
      choice[static_cast<std::size_t>(assignment)] = static_cast<std::int32_t>(e);
      rows[static_cast<std::size_t>(e)].push_back(static_cast<std::int32_t>(assignment));
    }
  }
  std::int32_t row = 0;
  for (const auto& of_expert : rows) {
    offset.push_back(row);
    for (const std::int32_t assignment : of_expert) {
      token_of[static_cast<std::size_t>(row)] = assignment / static_cast<std::int32_t>(s.choices);
      row_of[static_cast<std::size_t>(assignment)] = row++;
    }
  }
  offset.push_back(row);
  const TensorView topk = upload(choice, chosen), offsets = upload(offset, {s.experts + 1}),
                   token_of_row = upload(token_of, {rows_in_all}),
                   row_of_assignment = upload(row_of, chosen);
  const std::string text = fmt::format("{}x{}, top {}", s.tokens, s.experts, s.choices);
  if (wanted("router")) {
    const TensorView scores = random(all, stats_, 0.1, 0.5),
                     weights = random(chosen, stats_, 0.01, 0.25), logits = statistic(all);
    add(RouterForward{.scores = statistic(all),
                      .topk = memory(chosen, DType::i32),
                      .weights = statistic(chosen),
                      .cutoff = statistic({s.tokens}),
                      .counts = memory({s.experts}, DType::i32),
                      .logits = logits,
                      .bias = random({s.experts}, stats_, 0.1)},
        text);
    add(RouterBackward{.dlogits = statistic(all),
                       .dweights = statistic(chosen),
                       .logits = logits,
                       .scores = scores,
                       .weights = weights,
                       .topk = topk},
        text);
  }
  if (wanted(DispatchPlan::kName)) {
    add(DispatchPlan{.offsets = memory({s.experts + 1}, DType::i32),
                     .row_of_assignment = memory(chosen, DType::i32),
                     .token_of_row = memory({rows_in_all}, DType::i32),
                     .topk = topk},
        text);
  }
  const Shape wide{rows_in_all, s.latent}, narrow{s.tokens, s.latent};
  if (wanted(GatherRows::kName))
    add(dispatch_rows(activation(wide), activation(narrow), token_of_row, offsets),
        fmt::format("{}x{}", rows_in_all, s.latent));
  if (wanted(CombineRows::kName))
    add(combine_rows(activation(narrow), activation(wide), statistic(chosen), row_of_assignment),
        fmt::format("{}x{} to {}x{}", rows_in_all, s.latent, s.tokens, s.latent));
}

OpCases::Groups OpCases::even_groups(std::int64_t experts, std::int64_t rows) {
  std::vector<std::int32_t> offset, slot;
  for (std::int64_t e = 0; e <= experts; ++e)
    offset.push_back(static_cast<std::int32_t>(e * rows));
  for (std::int64_t e = 0; e < experts; ++e)
    slot.push_back(static_cast<std::int32_t>(e));
  return {upload(offset, {experts + 1}), upload(slot, {experts})};
}

void OpCases::grouped(std::int64_t experts, std::int64_t rows, std::int64_t k, std::int64_t n) {
  const auto [offsets, slots] = even_groups(experts, rows);
  const TensorView x = activation({experts * rows, k}), w = activation({experts, n, k}),
                   y = activation({experts * rows, n});
  const std::string text = fmt::format("{} experts, {}x{}x{}", experts, rows, n, k);
  if (wanted(GroupedLinearForward::kName))
    add(GroupedLinearForward{.y = activation(y.shape()),
                             .x = x,
                             .w = w,
                             .offsets = offsets,
                             .slot_of_expert = slots},
        text);
  if (wanted(GroupedLinearBackwardInput::kName))
    add(GroupedLinearBackwardInput{.dx = activation(x.shape()),
                                   .dy = y,
                                   .w = w,
                                   .offsets = offsets,
                                   .slot_of_expert = slots},
        text);
  if (wanted(GroupedLinearBackwardWeight::kName))
    add(GroupedLinearBackwardWeight{.dw = statistic(w.shape()),
                                    .dy = y,
                                    .x = x,
                                    .offsets = offsets,
                                    .slot_of_expert = slots},
        text);
}

void OpCases::grouped_glu(
    std::int64_t experts, std::int64_t rows, std::int64_t k, std::int64_t width, bool situ) {
  if (!wanted("grouped_glu")) return;
  const auto [offsets, slots] = even_groups(experts, rows);
  const std::int64_t all = experts * rows;
  const GluActivation activation_kind{.kind = situ ? GluKind::situ : GluKind::swiglu};
  const std::string text = fmt::format(
      "{}, {} experts, {}x{}, inner {}", situ ? "situ" : "swiglu", experts, rows, k, width);
  const TensorView x = activation({all, k}), gate_up = activation({all, 2 * width}),
                   h = activation({all, width});
  if (wanted(GroupedGluForward::kName)) {
    // Products of about unit variance, so that activations work where they do in training.
    const TensorView w =
        random({experts, 2 * width, k}, dtype_, 1 / std::sqrt(static_cast<double>(k)));
    GroupedGluForward op{.h = h,
                         .x = x,
                         .w = w,
                         .offsets = offsets,
                         .slot_of_expert = slots,
                         .activation = activation_kind};
    add(op, text);
    op.gate_up = gate_up;
    add(op, text + ", both kept");
  }
  if (wanted(GroupedGluBackward::kName)) {
    const TensorView w = random({experts, k, width}, dtype_, 1 / std::sqrt(static_cast<double>(k)));
    add(GroupedGluBackward{.dgate_up = activation(gate_up.shape()),
                           .drow_weight = statistic({all}),
                           .h = h,
                           .dy = x,
                           .w = w,
                           .gate_up = activation(gate_up.shape()),
                           .row_weight = random({all}, stats_, 0.05, 0.15),
                           .offsets = offsets,
                           .slot_of_expert = slots,
                           .activation = activation_kind,
                           .weight_h = true},
        text);
  }
}

}  // namespace moesaic::bench
