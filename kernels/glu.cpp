#include "kernels/ops/glu.h"

#include "kernels/checks.h"

namespace moesaic {
namespace {

void check_rows(const ConstTensorView& first_row, const ConstTensorView& row_count) {
  for (const ConstTensorView& row : {first_row, row_count}) {
    if (row.empty()) continue;
    MOESAIC_CHECK(row.numel() == 1, "first_row and row_count must hold one element");
    check_dtype(row, DType::i32, "first_row and row_count");
  }
}

void check_activation(const GluActivation& a) {
  MOESAIC_CHECK(a.kind == GluKind::swiglu || (a.beta1 > 0 && a.beta2 > 0),
                "situ needs positive limits");
}

}  // namespace

void GluForward::check() const {
  MOESAIC_CHECK(h.rank() == 2, "h must be [rows, width]");
  check_shape(gate_up, {h.dim(0), 2 * h.dim(1)}, "gate_up");
  check_dtype(gate_up, h.dtype(), "gate_up");
  check_rows(first_row, row_count);
  check_activation(activation);
}

OpCost GluForward::cost() const {
  return {8.0 * static_cast<double>(h.numel()), total_bytes({h, gate_up})};
}

void GluBackward::check() const {
  MOESAIC_CHECK(dh.rank() == 2, "dh must be [rows, width]");
  check_shape(gate_up, {dh.dim(0), 2 * dh.dim(1)}, "gate_up");
  check_dtype(gate_up, dh.dtype(), "gate_up");
  check_like(dgate_up, gate_up, "dgate_up");
  if (!h.empty()) check_like(h, dh, "h");
  if (!row_weight.empty()) check_acc(row_weight, {dh.dim(0)}, dh.dtype(), "row_weight");
  if (!drow_weight.empty()) {
    MOESAIC_CHECK(!row_weight.empty(), "drow_weight needs row_weight");
    check_acc(drow_weight, {dh.dim(0)}, dh.dtype(), "drow_weight");
  }
  MOESAIC_CHECK(!weight_h || (!row_weight.empty() && !h.empty()),
                "weight_h needs row_weight and h");
  check_rows(first_row, row_count);
  check_activation(activation);
}

OpCost GluBackward::cost() const {
  return {20.0 * static_cast<double>(dh.numel()), total_bytes({dh, gate_up, dgate_up, h})};
}

}  // namespace moesaic
