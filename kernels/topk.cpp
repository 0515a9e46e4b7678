#include "kernels/ops/topk.h"

namespace moesaic {

void TopK::check() const {
  MOESAIC_CHECK(indices.rank() == 2 && indices.dim(1) > 0 && indices.dim(1) <= kMaxEntries,
                "indices must be [rows, k], 0 < k <= kMaxEntries");
  check_dtype(indices, DType::i32, "indices");
  const Shape per_row{indices.dim(0)};
  if (!counts.empty()) {
    check_shape(counts, per_row, "counts");
    check_dtype(counts, DType::i32, "counts");
  }
  if (!given.empty()) {
    check_shape(given, indices.shape(), "given");
    check_dtype(given, DType::i32, "given");
    return;
  }
  MOESAIC_CHECK(scores.rank() == 2 && scores.dim(0) == indices.dim(0), "scores must be [rows, n]");
  MOESAIC_CHECK(scores.dim(1) <= kMaxEntries, "too many entries in a row");
  MOESAIC_CHECK(scores.dtype() == DType::f64 || scores.dtype() == DType::f32,
                "scores are f64 or f32");
  MOESAIC_CHECK(order == Order::ascending || indices.dim(1) <= kMaxSorted,
                "best_first is for k <= kMaxSorted");
  if (!valid_count.empty()) {
    check_shape(valid_count, per_row, "valid_count");
    check_dtype(valid_count, DType::i32, "valid_count");
  }
}

OpCost TopK::cost() const {
  const double read =
      given.empty() ? static_cast<double>(scores.bytes()) : static_cast<double>(given.bytes());
  return {given.empty() ? static_cast<double>(scores.numel()) : 0.0,
          read + static_cast<double>(indices.bytes())};
}

}  // namespace moesaic
