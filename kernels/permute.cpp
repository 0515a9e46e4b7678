#include "kernels/ops/permute.h"

#include <fmt/format.h>

namespace moesaic {
namespace {

void check_i32(const ConstTensorView& v, const char* what) {
  check_dtype(v, DType::i32, what);
}

// Optional.
void check_one_i32(const ConstTensorView& v, const char* what) {
  if (v.empty()) return;
  MOESAIC_CHECK(v.numel() == 1, std::string(what) + " must be one element");
  check_i32(v, what);
}

double sum_bytes(std::initializer_list<ConstTensorView> views) {
  double sum = 0;
  for (const auto& v : views) {
    if (!v.empty()) sum += static_cast<double>(v.bytes());
  }
  return sum;
}

void check_row_weights(const ConstTensorView& rows,
                       const ConstTensorView& weights,
                       const ConstTensorView& map) {
  MOESAIC_CHECK(rows.rank() == 1 && map.rank() == 2,
                "row weights must be [rows], the map [tokens, k]");
  MOESAIC_CHECK(rows.dtype() == DType::f64 || rows.dtype() == DType::f32,
                "weights must be f64 or f32");
  check_dtype(weights, rows.dtype(), "weights");
  check_shape(weights, map.shape(), "weights");
  check_i32(map, "row_of_assignment");
}

}  // namespace

void DispatchPlan::check() const {
  MOESAIC_CHECK(topk.rank() == 2, "topk must be [tokens, k]");
  MOESAIC_CHECK(offsets.rank() == 1 && offsets.dim(0) >= 2, "offsets must be [experts + 1]");
  MOESAIC_CHECK(token_of_row.rank() == 1, "token_of_row must be [rows]");
  check_one_i32(token_count, "token_count");
  check_one_i32(overflow, "overflow");
  check_shape(row_of_assignment, topk.shape(), "row_of_assignment");
  check_i32(offsets, "offsets");
  check_i32(token_of_row, "token_of_row");
  check_i32(row_of_assignment, "row_of_assignment");
  check_i32(topk, "topk");
  if (!kept.empty()) {
    check_shape(kept, topk.shape(), "kept");
    check_dtype(kept, DType::u8, "kept");
  }
}

OpCost DispatchPlan::cost() const {
  return {0, sum_bytes({offsets, row_of_assignment, token_of_row, topk, kept})};
}

void GatherRows::check() const {
  MOESAIC_CHECK(x.rank() == 2 && y.rank() == 2 && x.dim(1) == y.dim(1),
                "x and y must be [.., width]");
  check_dtype(y, x.dtype(), "y");
  MOESAIC_CHECK(x.data() != y.data() || x.numel() == 0, "y must not alias x");
  check_shape(token_of_row, {y.dim(0)}, "token_of_row");
  check_i32(token_of_row, "token_of_row");
  check_one_i32(num_rows, "num_rows");
}

OpCost GatherRows::cost() const {
  return {0, 2.0 * static_cast<double>(y.bytes()) + sum_bytes({token_of_row})};
}

void CombineRows::check() const {
  MOESAIC_CHECK(u.rank() == 2 && y.rank() == 2 && u.dim(1) == y.dim(1),
                "u and y must be [.., width]");
  MOESAIC_CHECK(row_of_assignment.rank() == 2 && row_of_assignment.dim(0) == u.dim(0),
                "row_of_assignment must be [tokens, k]");
  check_i32(row_of_assignment, "row_of_assignment");
  const DType wide = y.dtype() == DType::f64 ? DType::f64 : DType::f32;
  MOESAIC_CHECK(u.dtype() == y.dtype() || u.dtype() == wide,
                fmt::format("u is {} next to y of {}", name(u.dtype()), name(y.dtype())));
  check_one_i32(token_count, "token_count");
  if (!weights.empty()) {
    check_shape(weights, row_of_assignment.shape(), "weights");
    check_dtype(weights, wide, "weights");
  }
}

OpCost CombineRows::cost() const {
  const double terms =
      static_cast<double>(row_of_assignment.numel()) * static_cast<double>(u.dim(1));
  return {2.0 * terms,
          terms * static_cast<double>(byte_size(y.dtype())) +
              sum_bytes({u, weights, row_of_assignment})};
}

void RowWeightForward::check() const {
  check_row_weights(row_weight, weights, row_of_assignment);
}
OpCost RowWeightForward::cost() const {
  return {0, sum_bytes({row_weight, weights, row_of_assignment})};
}

void RowWeightBackward::check() const {
  check_row_weights(drow_weight, dweights, row_of_assignment);
}
OpCost RowWeightBackward::cost() const {
  return {0, sum_bytes({drow_weight, dweights, row_of_assignment})};
}

}  // namespace moesaic
