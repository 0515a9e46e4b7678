#include "kernels/ops/balance.h"

#include <fmt/format.h>

namespace moesaic {
namespace {

void check_stats(const ConstTensorView& v, const char* what) {
  MOESAIC_CHECK(v.dtype() == DType::f64 || v.dtype() == DType::f32,
                fmt::format("{} must be f64 or f32, is {}", what, name(v.dtype())));
}

void check_bias(const ConstTensorView& bias) {
  MOESAIC_CHECK(bias.rank() == 1 && bias.dim(0) >= 1, "bias must be [experts]");
  check_stats(bias, "bias");
}

void check_counts(const ConstTensorView& counts, std::int64_t experts) {
  check_shape(counts, {experts}, "counts");
  MOESAIC_CHECK(counts.dtype() == DType::i64 || counts.dtype() == DType::i32,
                "counts must be i64 or i32");
}

void check_one(const ConstTensorView& v, const char* what) {
  const DType t = v.dtype();
  MOESAIC_CHECK(
      v.numel() == 1 && (t == DType::f64 || t == DType::f32 || t == DType::i64 || t == DType::i32),
      fmt::format("{} must be one element f64, f32, i64 or i32", what));
}

void check_skip(const ConstTensorView& skip) {
  if (!skip.empty()) check_one(skip, "skip");
}

double bytes_of(const ConstTensorView& a, const ConstTensorView& b) {
  return static_cast<double>(a.bytes() + b.bytes());
}

}  // namespace

void BalanceHistogram::check() const {
  MOESAIC_CHECK(scores.rank() == 2 && histogram.rank() == 2,
                "scores must be [tokens, experts], histogram [experts, bins]");
  check_stats(scores, "scores");
  MOESAIC_CHECK(histogram.dim(0) == scores.dim(1) && histogram.dim(1) >= 1,
                "histogram must be [experts, bins]");
  check_dtype(histogram, DType::i32, "histogram");
  check_shape(cutoff, {scores.dim(0)}, "cutoff");
  check_dtype(cutoff, scores.dtype(), "cutoff");
  check_shape(bias, {scores.dim(1)}, "bias");
  check_dtype(bias, scores.dtype(), "bias");
}
OpCost BalanceHistogram::cost() const {
  return {4.0 * static_cast<double>(scores.numel()), bytes_of(scores, histogram)};
}

void BalanceBiasFromHistogram::check() const {
  check_bias(bias);
  MOESAIC_CHECK(histogram.rank() == 2 && histogram.dim(0) == bias.dim(0) && histogram.dim(1) >= 1,
                "histogram must be [experts, bins]");
  check_dtype(histogram, DType::i32, "histogram");
  MOESAIC_CHECK(!tokens.empty(), "needs the number of tokens");
  check_one(tokens, "tokens");
  check_skip(skip);
  MOESAIC_CHECK(1 <= top_k && top_k <= bias.dim(0), "top_k outside 1 .. experts");
}
OpCost BalanceBiasFromHistogram::cost() const {
  return {static_cast<double>(histogram.numel()), bytes_of(bias, histogram)};
}

void BalanceMargins::check() const {
  MOESAIC_CHECK(scores.rank() == 2, "scores must be [tokens, experts]");
  check_stats(scores, "scores");
  check_shape(margins, scores.shape(), "margins");
  check_dtype(margins, scores.dtype(), "margins");
  check_shape(cutoff, {scores.dim(0)}, "cutoff");
  check_dtype(cutoff, scores.dtype(), "cutoff");
}
OpCost BalanceMargins::cost() const {
  return {static_cast<double>(scores.numel()), bytes_of(scores, margins)};
}

void BalanceBiasExact::check() const {
  check_bias(bias);
  MOESAIC_CHECK(margins.rank() == 2 && margins.dim(1) == bias.dim(0) && margins.dim(0) >= 1,
                "margins must be [tokens, experts]");
  check_dtype(margins, bias.dtype(), "margins");
  check_skip(skip);
  MOESAIC_CHECK(1 <= top_k && top_k <= bias.dim(0), "top_k outside 1 .. experts");
}
OpCost BalanceBiasExact::cost() const {
  return {4.0 * static_cast<double>(margins.numel()), bytes_of(bias, margins)};
}

void BalanceBiasSign::check() const {
  check_bias(bias);
  check_counts(counts, bias.dim(0));
  check_skip(skip);
}
OpCost BalanceBiasSign::cost() const {
  return {static_cast<double>(bias.numel()), bytes_of(bias, counts)};
}

void AccumulateCounts::check() const {
  MOESAIC_CHECK(total.rank() == 1, "total must be [experts]");
  check_dtype(total, DType::i64, "total");
  check_counts(counts, total.dim(0));
}
OpCost AccumulateCounts::cost() const {
  return {0, bytes_of(total, counts)};
}

void BalanceFrequency::check() const {
  check_bias(frequency);
  check_counts(counts, frequency.dim(0));
  check_skip(skip);
}
OpCost BalanceFrequency::cost() const {
  return {static_cast<double>(frequency.numel()), bytes_of(frequency, counts)};
}

}  // namespace moesaic
