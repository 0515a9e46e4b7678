#pragma once
#include "kernels/ops/op.h"

namespace moesaic {

/// Depthwise causal convolution inside documents, optionally followed by SiLU:
///
///   pre[t, c] = sum_j w[c, j] x[t - (k-1) + j, c],   y = silu(pre) or pre
///
///   x, y        [T, C]        f64 | f32 | bf16; y must not alias x (backward reads x)
///   w           [C, k]        type of x or its acc_t; w[c, k-1] multiplies the current token; k >=
///   1
///   history     [N, k-1, C]   type of x; rows before each document, oldest first; empty = zeros.
///                             [1, k-1, C]: before the first document, zeros before the others
///   cu_seqlens  [N+1] i32     0 = cu[0] <= ... <= cu[N] = T; read inside the stream
///
/// Rows before a document's start are never read. Nothing is saved but x: backward recomputes pre.
/// Source: SPEC 1.2.
struct ShortConvForward {
  static constexpr const char* kName = "short_conv_forward";
  TensorView y;
  ConstTensorView x;
  ConstTensorView w;
  ConstTensorView history = {};
  ConstTensorView cu_seqlens;
  bool silu = true;

  void check() const;
  OpCost cost() const;
};

/// dx_s = sum_j w[., j] dpre_{s+k-1-j} over outputs of the same document, dw[., j] += sum_t dpre_t
/// x_{t-(k-1)+j}, dpre = dy silu'(pre).
///
///   dx, dy, x   [T, C]; dx is overwritten; it may alias dy, not x
///   dw          [C, k]        acc_t of x; accumulates; empty = frozen
///   dhistory    [N, k-1, C]   type of x; overwritten; empty = not wanted. [1, k-1, C]: of the first document
///
/// The sum over tokens runs over fixed blocks of a document, then over blocks and documents in
/// order.
struct ShortConvBackward {
  static constexpr const char* kName = "short_conv_backward";
  TensorView dx;
  TensorView dw = {};
  TensorView dhistory = {};
  ConstTensorView dy;
  ConstTensorView x;
  ConstTensorView w;
  ConstTensorView history = {};
  ConstTensorView cu_seqlens;
  bool silu = true;

  void check() const;
  OpCost cost() const;
};

/// The history with which the next piece of each document continues: the last k-1 rows of (history,
/// x of the document).
///
///   next     [N, k-1, C]   type of x; may alias history
///   history  as in ShortConvForward; empty = zeros
struct ShortConvTail {
  static constexpr const char* kName = "short_conv_tail";
  TensorView next;
  ConstTensorView x;
  ConstTensorView history = {};
  ConstTensorView cu_seqlens;

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const ShortConvForward& op);
void launch(CpuContext& context, const ShortConvBackward& op);
void launch(CpuContext& context, const ShortConvTail& op);
void launch(CudaContext& context, const ShortConvForward& op);
void launch(CudaContext& context, const ShortConvBackward& op);
void launch(CudaContext& context, const ShortConvTail& op);

}  // namespace moesaic
