#pragma once
#include "kernels/ops/op.h"

namespace moesaic {

/// y = x * inv_rms * weight,  inv_rms = (mean(x^2) + eps)^(-1/2)  per row.
///
///   x, y     [tokens, hidden]   f64 | f32 | bf16; y may alias x
///   weight   [hidden]           floating
///   inv_rms  [tokens]           statistics type (f64 with f64, else f32), saved for backward
///
/// Sums in the statistics type; x * inv_rms is rounded to the type of x before it is multiplied by the weight, as the
/// released models do. Source: Zhang & Sennrich, arXiv:1910.07467; SPEC section 0.
struct RmsNormForward {
  static constexpr const char* kName = "rms_norm_forward";
  TensorView y;
  TensorView inv_rms;
  ConstTensorView x;
  ConstTensorView weight;
  double eps = 1e-5;

  void check() const;
  OpCost cost() const;
};

/// dx = inv_rms (w dy - xh mean(xh w dy)),  dweight += sum over rows (dy xh),  xh = x inv_rms.
///
///   dx, dy, x  [tokens, hidden];  dx may alias dy
///   dweight    [hidden]  gradient type; accumulates; empty = frozen
///   accumulate_dx: dx += instead of dx =
///
/// The sum over rows runs over fixed blocks, then over the blocks: 64 rows in order on the CPU; on CUDA a multiple of 64 that
/// depends on the number of rows alone, so that at most 512 partial sums lie in scratch.
struct RmsNormBackward {
  static constexpr const char* kName = "rms_norm_backward";
  TensorView dx;
  TensorView dweight;
  ConstTensorView dy;
  ConstTensorView x;
  ConstTensorView weight;
  ConstTensorView inv_rms;
  bool accumulate_dx = false;

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const RmsNormForward& op);
void launch(CpuContext& context, const RmsNormBackward& op);
void launch(CudaContext& context, const RmsNormForward& op);
void launch(CudaContext& context, const RmsNormBackward& op);

}  // namespace moesaic
