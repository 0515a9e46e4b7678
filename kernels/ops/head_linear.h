#pragma once
#include "kernels/ops/op.h"

namespace moesaic {

/// The channels [begin, begin + n) of every head of x [T, H, channels]; n follows from the other operand.
template <class View>
struct HeadColumns {
  View x;
  std::int64_t begin = 0;
};

/// A linear map of its own for every head, from some channels of it to some channels: with W_h [m, n] = rows
/// [row_begin, row_begin + m) of block h of w [H * block, n],
///
///   y_h(t) = W_h^T x_h(t)   (m channels to n),  or, transposed, y_h(t) = W_h x_h(t)   (n channels to m)
///
///   y.x [T, H, channels]  the type of x, or its wider acc_t; only the named channels are written
///   x.x [T, H, channels]  f64 | f32 | bf16
///   w   [H * block, n]    the type of x
///
/// The absorbed form of MLA (SPEC 2.2) is made of these: queries times the key part of kv_b_proj, latent outputs times
/// its value part transposed, and their gradients, which are the other one. Sums in acc_t, ascending; a row's bits do not
/// depend on the other rows.
struct HeadLinear {
  static constexpr const char* kName = "head_linear";
  HeadColumns<TensorView> y;
  HeadColumns<ConstTensorView> x;
  ConstTensorView w;
  std::int64_t row_begin = 0;
  std::int64_t m = 0;
  bool transpose_w = false;

  void check() const;
  OpCost cost() const;
  std::int64_t from() const { return transpose_w ? w.dim(1) : m; }
  std::int64_t to() const { return transpose_w ? m : w.dim(1); }
};

/// dW_h += sum_t a_h(t) b_h(t)^T, a of m channels, b of n.
///
///   dw   [H * block, n]       the type of a, or its wider acc_t; accumulates
///   a, b [T, H, channels]     one type of f64 | f32 | bf16
struct HeadLinearBackwardWeight {
  static constexpr const char* kName = "head_linear_backward_weight";
  TensorView dw;
  HeadColumns<ConstTensorView> a;
  HeadColumns<ConstTensorView> b;
  std::int64_t row_begin = 0;
  std::int64_t m = 0;

  void check() const;
  OpCost cost() const;
};

/// The n named channels of every head of y become those of x. One type; no aliasing.
struct CopyHeadColumns {
  static constexpr const char* kName = "copy_head_columns";
  HeadColumns<TensorView> y;
  HeadColumns<ConstTensorView> x;
  std::int64_t n = 0;

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const CopyHeadColumns& op);
void launch(CudaContext& context, const CopyHeadColumns& op);
void launch(CpuContext& context, const HeadLinear& op);
void launch(CpuContext& context, const HeadLinearBackwardWeight& op);
void launch(CudaContext& context, const HeadLinear& op);
void launch(CudaContext& context, const HeadLinearBackwardWeight& op);

}  // namespace moesaic
