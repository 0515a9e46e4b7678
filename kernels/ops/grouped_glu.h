#pragma once
#include "kernels/ops/glu.h"
#include "kernels/ops/op.h"

namespace moesaic {

// A grouped product and the gated linear unit behind (or before) it as one op. The bits are those of GroupedLinearForward
// and GluForward, or GroupedLinearBackwardInput and GluBackward, one after the other; what lies between them is rounded to
// its type as it would be in memory, but goes there only if it is asked for. Paths on CUDA: "fused", or "separate" for
// sizes and types that have no tensor-core kernel.

/// h_t = act(W[slot_of_expert[e]] x_t) for the rows t of expert e: both halves of an expert's first layer.
///
///   x               [rows_bound, k]      f64 | f32 | bf16, rows sorted by expert
///   w               [slots, 2 width, k]  the type of x: gates in rows [0, width), ups in [width, 2 width)
///   h               [rows_bound, width]  the type of x
///   gate_up         [rows_bound, 2 width]  optional, the type of x: W x, where backward will read it (GroupedGluBackward)
///   offsets, slot_of_expert              as in GroupedLinearForward; rows of no expert of the call are not touched
///
/// Without gate_up, "separate" and the CPU take as much memory from scratch.
struct GroupedGluForward {
  static constexpr const char* kName = "grouped_glu_forward";
  TensorView h{};
  TensorView gate_up{};
  ConstTensorView x{};
  ConstTensorView w{};
  ConstTensorView offsets{};
  ConstTensorView slot_of_expert{};
  GluActivation activation{};

  void check() const;
  OpCost cost() const;
};

/// From the gradient dy of an expert's output to d(gate_up), through y_t = W h_t and h_t = act(gate_up_t):
/// r_t = W[slot_of_expert[e]]^T dy_t, then GluBackward with dh = r.
///
///   dy            [rows_bound, n]         f64 | f32 | bf16: before the row weight is applied (SPEC 4.4)
///   w             [slots, n, width]       the type of dy
///   gate_up       [rows_bound, 2 width]   the type of dy
///   dgate_up      [rows_bound, 2 width]   overwritten; may alias gate_up
///   h             [rows_bound, width]     overwritten: h_t, or w_t h_t with `weight_h` (operand of the gradient of W)
///   row_weight    [rows_bound] acc_t      optional w_t (1 when absent)
///   drow_weight   [rows_bound] acc_t      optional, needs row_weight: <r_t, h_t>, overwritten
struct GroupedGluBackward {
  static constexpr const char* kName = "grouped_glu_backward";
  TensorView dgate_up{};
  TensorView drow_weight{};
  TensorView h{};
  ConstTensorView dy{};
  ConstTensorView w{};
  ConstTensorView gate_up{};
  ConstTensorView row_weight{};
  ConstTensorView offsets{};
  ConstTensorView slot_of_expert{};
  GluActivation activation{};
  bool weight_h = false;

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const GroupedGluForward& op);
void launch(CpuContext& context, const GroupedGluBackward& op);
void launch(CudaContext& context, const GroupedGluForward& op);
void launch(CudaContext& context, const GroupedGluBackward& op);

}  // namespace moesaic
