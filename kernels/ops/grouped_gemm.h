#pragma once
#include "kernels/ops/op.h"

namespace moesaic {

/// y_t = W[slot_of_expert[e]] x_t for the rows t in [offsets[e], offsets[e+1]) of expert e: one linear layer per expert.
///
///   x               [rows_bound, k]   f64 | f32 | bf16, rows sorted by expert
///   w               [slots, n, k]     the type of x
///   y               [rows_bound, n]   the type of x, or its wider acc_t
///   offsets         [experts + 1]     i32, read inside the stream; ascending, from 0 or a later row on, at most rows_bound
///   slot_of_expert  [experts]         i32, read inside the stream
///
/// The experts may be a run of those whose rows lie there: rows before offsets[0] and from offsets[experts] on are not
/// written, and their values do not matter. An element is summed as in Gemm, so a row's bits depend neither on how many rows
/// its expert has, nor on the other experts of the call, nor on threads.
struct GroupedLinearForward {
  static constexpr const char* kName = "grouped_linear_forward";
  TensorView y{};
  ConstTensorView x{};
  ConstTensorView w{};
  ConstTensorView offsets{};
  ConstTensorView slot_of_expert{};
  bool accumulate = false;

  void check() const;
  OpCost cost() const;
};

/// dx_t (+)= W[slot_of_expert[e]]^T dy_t; shapes, types, offsets and order as in the forward op.
struct GroupedLinearBackwardInput {
  static constexpr const char* kName = "grouped_linear_backward_input";
  TensorView dx{};
  ConstTensorView dy{};
  ConstTensorView w{};
  ConstTensorView offsets{};
  ConstTensorView slot_of_expert{};
  bool accumulate = false;

  void check() const;
  OpCost cost() const;
};

/// dw[slot_of_expert[e]] += sum over the expert's rows t of dy_t x_t^T.
///
///   dw  [slots, n, k]  acc_t or the type of x; accumulates; a slot whose expert has no row keeps its bits
///
/// Two experts must not share a slot. The sum over rows has a fixed order. On the CPU an element's sum begins with dw and goes
/// on row by row (dw of the type of the sum): an expert's rows in several calls, one after the other, give the bits of one. On
/// the GPU it runs in fixed blocks that start at the expert's first row. Either way the other experts of the call do not matter.
struct GroupedLinearBackwardWeight {
  static constexpr const char* kName = "grouped_linear_backward_weight";
  TensorView dw{};
  ConstTensorView dy{};
  ConstTensorView x{};
  ConstTensorView offsets{};
  ConstTensorView slot_of_expert{};

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const GroupedLinearForward& op);
void launch(CpuContext& context, const GroupedLinearBackwardInput& op);
void launch(CpuContext& context, const GroupedLinearBackwardWeight& op);
void launch(CudaContext& context, const GroupedLinearForward& op);
void launch(CudaContext& context, const GroupedLinearBackwardInput& op);
void launch(CudaContext& context, const GroupedLinearBackwardWeight& op);

}  // namespace moesaic
