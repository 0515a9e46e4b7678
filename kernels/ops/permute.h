#pragma once
#include "kernels/ops/op.h"

namespace moesaic {

/// Sorts the assignments of the tokens by expert: the plan by which rows move to their experts and
/// back.
///
///   topk               [tokens, k] i32  expert numbers; -1 = no choice
///   kept               [tokens, k] u8   0 = dropped (ExpertCapacity); empty = all kept
///   token_count        one i32 element; empty = all. Tokens from there on take no part.
///   offsets            [experts + 1] i32  rows of expert e are [offsets[e], offsets[e + 1]);
///   offsets[experts] is the
///                                         number of rows in use
///   row_of_assignment  [tokens, k] i32  the row of the assignment, -1 when it has none
///   token_of_row       [rows] i32       an upper bound; -1 beyond the rows in use
///   overflow           one i32 element, optional: how many assignments found no row. The offsets then
///   end at `rows` and these assignments have row -1; the step must not count. Without it
///   rows >= tokens * k, or whoever made the choices knows that they fit.
///
/// Rows of one expert are in token order (then in order of choice).
struct DispatchPlan {
  static constexpr const char* kName = "dispatch_plan";
  TensorView offsets;
  TensorView row_of_assignment;
  TensorView token_of_row;
  ConstTensorView topk;
  ConstTensorView kept;
  ConstTensorView token_count{};
  TensorView overflow{};

  void check() const;
  OpCost cost() const;
};

/// The number of rows in use, one i32 element at the end of DispatchPlan's offsets.
inline ConstTensorView rows_in_use(ConstTensorView offsets) {
  return offsets.rows(offsets.dim(0) - 1, offsets.dim(0));
}

/// The first row of the first expert, likewise: 0 for DispatchPlan's offsets, not for those of a run of experts.
inline ConstTensorView first_row(ConstTensorView offsets) {
  return offsets.rows(0, 1);
}

/// y[row] = x[token_of_row[row]]  for row < num_rows.
///
///   x [tokens, width], y [rows, width]   any type, the same;  y must not alias x
///   token_of_row [rows] i32;  num_rows one i32 element (rows_in_use), empty = all. Rows beyond num_rows
///   are left as they are.
struct GatherRows {
  static constexpr const char* kName = "gather_rows";
  TensorView y;
  ConstTensorView x;
  ConstTensorView token_of_row;
  ConstTensorView num_rows;

  void check() const;
  OpCost cost() const;
};

/// u[t] = sum over j = 0 .. k-1, in this order, of weights[t, j] y[row_of_assignment[t, j]].
///
///   u [tokens, width]   the type of y, or its wider acc_t;  y [rows, width]  f64 | f32 | bf16
///   weights [tokens, k] acc_t of the type of y; empty = 1.  row_of_assignment [tokens, k] i32; -1
///   adds nothing.  accumulate: u += instead of u =.  Sums in acc_t and rounds once.
///   token_count one i32 element, empty = all: u is left as it is from there on.
struct CombineRows {
  static constexpr const char* kName = "combine_rows";
  TensorView u;
  ConstTensorView y;
  ConstTensorView weights;
  ConstTensorView row_of_assignment;
  bool accumulate = false;
  ConstTensorView token_count{};

  void check() const;
  OpCost cost() const;
};

/// row_weight[row_of_assignment[t, j]] = weights[t, j]; rows that are not in use are left as they
/// are.
///
///   weights [tokens, k], row_weight [rows]  statistics type;  row_of_assignment [tokens, k] i32
struct RowWeightForward {
  static constexpr const char* kName = "row_weight_forward";
  TensorView row_weight;
  ConstTensorView weights;
  ConstTensorView row_of_assignment;

  void check() const;
  OpCost cost() const;
};

/// dweights[t, j] = drow_weight[row_of_assignment[t, j]], and 0 for dropped assignments.
struct RowWeightBackward {
  static constexpr const char* kName = "row_weight_backward";
  TensorView dweights;
  ConstTensorView drow_weight;
  ConstTensorView row_of_assignment;

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const DispatchPlan& op);
void launch(CpuContext& context, const GatherRows& op);
void launch(CpuContext& context, const CombineRows& op);
void launch(CpuContext& context, const RowWeightForward& op);
void launch(CpuContext& context, const RowWeightBackward& op);
void launch(CudaContext& context, const DispatchPlan& op);
void launch(CudaContext& context, const GatherRows& op);
void launch(CudaContext& context, const CombineRows& op);
void launch(CudaContext& context, const RowWeightForward& op);
void launch(CudaContext& context, const RowWeightBackward& op);

/// Tokens to their experts' rows: xs = gather of x.
inline GatherRows dispatch_rows(TensorView xs,
                                ConstTensorView x,
                                ConstTensorView token_of_row,
                                ConstTensorView offsets) {
  return {.y = xs, .x = x, .token_of_row = token_of_row, .num_rows = rows_in_use(offsets)};
}
/// dx (+)= sum over the token's rows of dxs.
inline CombineRows dispatch_rows_backward(TensorView dx,
                                          ConstTensorView dxs,
                                          ConstTensorView row_of_assignment,
                                          bool accumulate = false) {
  return {.u = dx,
          .y = dxs,
          .weights = {},
          .row_of_assignment = row_of_assignment,
          .accumulate = accumulate};
}
/// u = sum over the token's rows of weight times y.
inline CombineRows combine_rows(TensorView u,
                                ConstTensorView y,
                                ConstTensorView weights,
                                ConstTensorView row_of_assignment) {
  return {.u = u, .y = y, .weights = weights, .row_of_assignment = row_of_assignment};
}
/// dys = du of the row's token, unweighted: the weight enters behind the expert's down projection,
/// where r = W2^T du gives dweight = <r, h> and dh = weight r (SPEC 4.4), so the expert's output is
/// not needed.
inline GatherRows combine_rows_backward(TensorView dys,
                                        ConstTensorView du,
                                        ConstTensorView token_of_row,
                                        ConstTensorView offsets) {
  return {.y = dys, .x = du, .token_of_row = token_of_row, .num_rows = rows_in_use(offsets)};
}

}  // namespace moesaic
