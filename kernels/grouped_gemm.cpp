#include "kernels/ops/grouped_gemm.h"

namespace moesaic {
namespace {

void check_routing(const ConstTensorView& offsets,
                   const ConstTensorView& slots,
                   std::int64_t num_slots) {
  MOESAIC_CHECK(slots.rank() == 1, "slot_of_expert must be [experts]");
  MOESAIC_CHECK(num_slots > 0 || slots.dim(0) == 0, "no weight slots");
  check_dtype(slots, DType::i32, "slot_of_expert");
  check_shape(offsets, {slots.dim(0) + 1}, "offsets");
  check_dtype(offsets, DType::i32, "offsets");
}

void check_result(const ConstTensorView& result, DType operand, const char* what) {
  if (result.dtype() != operand)
    check_dtype(result, operand == DType::f64 ? DType::f64 : DType::f32, what);
}

// An upper bound: as if every row up to the bound were used.
OpCost product_cost(const ConstTensorView& rows,
                    const ConstTensorView& w,
                    const ConstTensorView& result) {
  return {2.0 * static_cast<double>(rows.dim(0)) * static_cast<double>(w.dim(1)) *
              static_cast<double>(w.dim(2)),
          static_cast<double>(rows.bytes() + w.bytes() + result.bytes())};
}

}  // namespace

void GroupedLinearForward::check() const {
  MOESAIC_CHECK(x.rank() == 2 && w.rank() == 3, "x must be [rows, k] and w [slots, n, k]");
  check_shape(w, {w.dim(0), w.dim(1), x.dim(1)}, "w");
  check_shape(y, {x.dim(0), w.dim(1)}, "y");
  check_dtype(w, x.dtype(), "w");
  check_result(y, x.dtype(), "y");
  check_routing(offsets, slot_of_expert, w.dim(0));
}
OpCost GroupedLinearForward::cost() const {
  return product_cost(x, w, y);
}

void GroupedLinearBackwardInput::check() const {
  MOESAIC_CHECK(dy.rank() == 2 && w.rank() == 3, "dy must be [rows, n] and w [slots, n, k]");
  check_shape(w, {w.dim(0), dy.dim(1), w.dim(2)}, "w");
  check_shape(dx, {dy.dim(0), w.dim(2)}, "dx");
  check_dtype(w, dy.dtype(), "w");
  check_result(dx, dy.dtype(), "dx");
  check_routing(offsets, slot_of_expert, w.dim(0));
}
OpCost GroupedLinearBackwardInput::cost() const {
  return product_cost(dy, w, dx);
}

void GroupedLinearBackwardWeight::check() const {
  MOESAIC_CHECK(dy.rank() == 2 && x.rank() == 2 && dw.rank() == 3, "dw must be [slots, n, k]");
  check_shape(x, {dy.dim(0), x.dim(1)}, "x");
  check_shape(dw, {dw.dim(0), dy.dim(1), x.dim(1)}, "dw");
  check_dtype(x, dy.dtype(), "x");
  check_result(dw, dy.dtype(), "dw");
  check_routing(offsets, slot_of_expert, dw.dim(0));
}
OpCost GroupedLinearBackwardWeight::cost() const {
  return product_cost(dy, dw, x);
}

}  // namespace moesaic
