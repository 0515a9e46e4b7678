#include "kernels/ops/router.h"

#include <fmt/format.h>

namespace moesaic {
namespace {

void check_stats(const ConstTensorView& v, const char* what) {
  MOESAIC_CHECK(v.dtype() == DType::f64 || v.dtype() == DType::f32,
                fmt::format("{} must be f64 or f32, is {}", what, name(v.dtype())));
}

void check_like(const ConstTensorView& v, const Shape& shape, DType dtype, const char* what) {
  check_shape(v, shape, what);
  check_dtype(v, dtype, what);
}

void check_divisor(const ConstTensorView& v, const char* what) {
  MOESAIC_CHECK(!v.empty() && v.numel() == 1, fmt::format("{} must be one element", what));
  const DType t = v.dtype();
  MOESAIC_CHECK(t == DType::f64 || t == DType::f32 || t == DType::i64 || t == DType::i32,
                fmt::format("{} is {}", what, name(t)));
}

double bytes_of(std::initializer_list<ConstTensorView> views) {
  double sum = 0;
  for (const auto& v : views) {
    if (!v.empty()) sum += static_cast<double>(v.bytes());
  }
  return sum;
}

}  // namespace

void RouterForward::check() const {
  MOESAIC_CHECK(logits.rank() == 2 && topk.rank() == 2,
                "logits must be [tokens, experts], topk [tokens, k]");
  check_stats(logits, "logits");
  const std::int64_t tokens = logits.dim(0), experts = logits.dim(1), k = topk.dim(1);
  MOESAIC_CHECK(1 <= k && k <= kMaxChoices && k <= experts,
                fmt::format("cannot choose {} of {} experts", k, experts));
  check_like(scores, logits.shape(), logits.dtype(), "scores");
  check_like(topk, {tokens, k}, DType::i32, "topk");
  check_like(weights, {tokens, k}, logits.dtype(), "weights");
  check_like(counts, {experts}, DType::i32, "counts");
  if (!bias.empty()) check_like(bias, {experts}, logits.dtype(), "bias");
  if (!given.empty()) check_like(given, {tokens, k}, DType::i32, "given");
  if (limits_groups()) {
    MOESAIC_CHECK(num_groups <= kMaxGroups && topk_groups >= 1 && experts % num_groups == 0,
                  fmt::format("{} experts cannot form {} groups of which {} are kept",
                              experts,
                              num_groups,
                              topk_groups));
    MOESAIC_CHECK(experts / num_groups * topk_groups >= k,
                  "the kept groups hold fewer than k experts");
  }
  if (!cutoff.empty()) {
    check_like(cutoff, {tokens}, logits.dtype(), "cutoff");
    MOESAIC_CHECK(k < experts, "a cutoff needs an expert that is not chosen");
    MOESAIC_CHECK(!limits_groups(), "a cutoff is defined without group limit only");
  }
}

OpCost RouterForward::cost() const {
  return {4.0 * static_cast<double>(logits.numel()),
          bytes_of({logits, scores, topk, weights, cutoff, bias, given})};
}

void ExpertCapacity::check() const {
  MOESAIC_CHECK(topk.rank() == 2, "topk must be [tokens, k]");
  check_like(kept, topk.shape(), DType::u8, "kept");
  check_dtype(topk, DType::i32, "topk");
  check_shape(weights, topk.shape(), "weights");
  check_stats(weights, "weights");
  MOESAIC_CHECK(num_experts >= 1 && capacity >= 0, "needs experts and a capacity");
}

OpCost ExpertCapacity::cost() const {
  return {0, bytes_of({kept, topk, weights})};
}

void RouterLosses::check(const ConstTensorView& scores) const {
  if (sequence_weight != 0) {
    MOESAIC_CHECK(cu.rank() == 1 && cu.dim(0) >= 1, "cu must be [documents + 1]");
    check_dtype(cu, DType::i32, "cu");
    check_divisor(documents, "documents");
  }
  if (switch_weight != 0 || global_weight != 0 || z_weight != 0) check_divisor(tokens, "tokens");
  if (global_weight != 0) check_like(frequency, {scores.dim(1)}, scores.dtype(), "frequency");
}

void RouterLossForward::check() const {
  MOESAIC_CHECK(scores.rank() == 2 && topk.rank() == 2,
                "scores must be [tokens, experts], topk [tokens, k]");
  check_stats(scores, "scores");
  check_like(logits, scores.shape(), scores.dtype(), "logits");
  check_like(topk, {scores.dim(0), topk.dim(1)}, DType::i32, "topk");
  if (!balance_loss.empty()) {
    check_dtype(balance_loss, scores.dtype(), "balance_loss");
    MOESAIC_CHECK(balance_loss.numel() == 1, "balance_loss must be one element");
  }
  if (!z_loss.empty()) {
    check_dtype(z_loss, scores.dtype(), "z_loss");
    MOESAIC_CHECK(z_loss.numel() == 1, "z_loss must be one element");
  }
  losses.check(scores);
}

OpCost RouterLossForward::cost() const {
  return {6.0 * static_cast<double>(scores.numel()), bytes_of({logits, scores, topk})};
}

void RouterBackward::check() const {
  MOESAIC_CHECK(scores.rank() == 2 && topk.rank() == 2,
                "scores must be [tokens, experts], topk [tokens, k]");
  check_stats(scores, "scores");
  const std::int64_t tokens = scores.dim(0), k = topk.dim(1);
  MOESAIC_CHECK(1 <= k && k <= kMaxChoices && k <= scores.dim(1), "k outside 1 .. experts");
  check_like(dlogits, scores.shape(), scores.dtype(), "dlogits");
  check_like(topk, {tokens, k}, DType::i32, "topk");
  check_like(weights, {tokens, k}, scores.dtype(), "weights");
  check_like(dweights, {tokens, k}, scores.dtype(), "dweights");
  if (losses.switch_weight != 0 || losses.z_weight != 0)
    check_like(logits, scores.shape(), scores.dtype(), "logits");
  losses.check(scores);
}

OpCost RouterBackward::cost() const {
  return {8.0 * static_cast<double>(scores.numel()),
          bytes_of({dlogits, scores, weights, dweights, topk})};
}

}  // namespace moesaic
