#pragma once
#include "kernels/ops/op.h"

namespace moesaic {

/// c (+)= alpha * op(a) op(b), op = identity or transpose; all row-major.
///
///   c [m, n];  a [m, k] or, transposed, [k, m];  b [k, n] or, transposed, [n, k]
///   a, b: f64 | f32 | bf16, one type;  c: the type of a, or its wider acc_t (f32 from bf16 operands)
///
/// Sums in acc_t. Contract of the CPU backend: the bits do not depend on the number of threads. Unless a is transposed, an
/// element is summed in ascending order of k, in blocks whose borders depend on k alone: a row has the same bits wherever
/// it stands and next to any number of rows. Sums over rows (a transposed) have that only when they are small
/// (kernels/cpu/gemm_blas.h).
///
/// A linear layer y = x W^T with W [out, in] is {y, x, W, transpose_b}; its gradients are {dx, dy, W} and
/// {dW, dy, x, transpose_a, accumulate}.
struct Gemm {
  static constexpr const char* kName = "gemm";
  TensorView c;
  ConstTensorView a;
  ConstTensorView b;
  bool transpose_a = false;
  bool transpose_b = false;
  bool accumulate = false;
  double alpha = 1.0;

  std::int64_t m() const { return c.dim(0); }
  std::int64_t n() const { return c.dim(1); }
  std::int64_t k() const { return transpose_a ? a.dim(0) : a.dim(1); }
  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const Gemm& op);
void launch(CudaContext& context, const Gemm& op);

/// y = x W^T;  x [tokens, in], w [out, in], y [tokens, out].
inline Gemm linear_forward(TensorView y,
                           ConstTensorView x,
                           ConstTensorView w,
                           bool accumulate = false) {
  return {.c = y, .a = x, .b = w, .transpose_b = true, .accumulate = accumulate};
}
/// dx (+)= dy W.
inline Gemm linear_backward_input(TensorView dx,
                                  ConstTensorView dy,
                                  ConstTensorView w,
                                  bool accumulate = false) {
  return {.c = dx, .a = dy, .b = w, .accumulate = accumulate};
}
/// dW += dy^T x.
inline Gemm linear_backward_weight(TensorView dw, ConstTensorView dy, ConstTensorView x) {
  return {.c = dw, .a = dy, .b = x, .transpose_a = true, .accumulate = true};
}

}  // namespace moesaic
