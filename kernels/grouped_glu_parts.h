#pragma once
// The ops that the grouped gated linear units consist of: what they are checked as, and what runs where no kernel does both.
#include "kernels/ops/grouped_gemm.h"
#include "kernels/ops/grouped_glu.h"
#include "kernels/ops/permute.h"

namespace moesaic {

inline GroupedLinearForward product_of(const GroupedGluForward& op, const TensorView& gate_up) {
  return {.y = gate_up,
          .x = op.x,
          .w = op.w,
          .offsets = op.offsets,
          .slot_of_expert = op.slot_of_expert};
}
inline GluForward activation_of(const GroupedGluForward& op, const ConstTensorView& gate_up) {
  return {.h = op.h,
          .gate_up = gate_up,
          .row_count = rows_in_use(op.offsets),
          .first_row = first_row(op.offsets),
          .activation = op.activation};
}

/// r = W^T dy, which takes the place of h until the activation overwrites it.
inline GroupedLinearBackwardInput product_of(const GroupedGluBackward& op) {
  return {.dx = op.h,
          .dy = op.dy,
          .w = op.w,
          .offsets = op.offsets,
          .slot_of_expert = op.slot_of_expert};
}
inline GluBackward activation_of(const GroupedGluBackward& op) {
  return {.dgate_up = op.dgate_up,
          .drow_weight = op.drow_weight,
          .h = op.h,
          .dh = op.h,
          .gate_up = op.gate_up,
          .row_weight = op.row_weight,
          .row_count = rows_in_use(op.offsets),
          .first_row = first_row(op.offsets),
          .activation = op.activation,
          .weight_h = op.weight_h};
}

/// One after the other, on either backend.
template <class Context>
void launch_parts(Context& context, const GroupedGluForward& op) {
  const Arena::Mark mark(context.scratch);
  const TensorView gate_up =
      op.gate_up.empty() ? context.scratch.take(
                               {op.h.dim(0), 2 * op.h.dim(1)}, op.h.dtype(), "grouped_glu.gate_up")
                         : op.gate_up;
  launch(context, product_of(op, gate_up));
  launch(context, activation_of(op, gate_up));
}
template <class Context>
void launch_parts(Context& context, const GroupedGluBackward& op) {
  launch(context, product_of(op));
  launch(context, activation_of(op));
}

}  // namespace moesaic
