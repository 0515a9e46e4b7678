#pragma once
#include "kernels/ops/op.h"

namespace moesaic {

/// y = (x - mean) inv_std weight + bias,  inv_std = (mean((x - mean)^2) + eps)^(-1/2)  per row (SPEC 3.1).
///
///   x, y           [rows, width]  f64 | f32 | bf16; y may alias x
///   weight, bias   [width]        one type: that of x or acc_t
///   mean, inv_std  [rows]         acc_t, saved for backward
struct LayerNormForward {
  static constexpr const char* kName = "layer_norm_forward";
  TensorView y{};
  TensorView mean{};
  TensorView inv_std{};
  ConstTensorView x{};
  ConstTensorView weight{};
  ConstTensorView bias{};
  double eps = 1e-6;

  void check() const;
  OpCost cost() const;
};

/// With xh = (x - mean) inv_std and g = weight dy:  dx = inv_std (g - mean(g) - xh mean(g xh)),
/// dweight += sum dy xh,  dbias += sum dy  (acc_t; accumulate; either empty = frozen; fixed blocks of 64 rows).
/// dx may alias dy.
struct LayerNormBackward {
  static constexpr const char* kName = "layer_norm_backward";
  TensorView dx{};
  TensorView dweight{};
  TensorView dbias{};
  ConstTensorView dy{};
  ConstTensorView x{};
  ConstTensorView weight{};
  ConstTensorView mean{};
  ConstTensorView inv_std{};

  void check() const;
  OpCost cost() const;
};

/// y = x inv_norm scale,  inv_norm = (sum(x^2) + eps)^(-1/2)  per row (SPEC 0; eps is added to the sum).
///
///   x, y      [rows, width]  f64 | f32 | bf16; y may alias x
///   inv_norm  [rows]         acc_t, saved for backward
struct L2NormForward {
  static constexpr const char* kName = "l2_norm_forward";
  TensorView y{};
  TensorView inv_norm{};
  ConstTensorView x{};
  double eps = 1e-6;
  double scale = 1.0;

  void check() const;
  OpCost cost() const;
};

/// With xh = x inv_norm:  dx = scale inv_norm (dy - xh <xh, dy>). dx may alias dy.
struct L2NormBackward {
  static constexpr const char* kName = "l2_norm_backward";
  TensorView dx{};
  ConstTensorView dy{};
  ConstTensorView x{};
  ConstTensorView inv_norm{};
  double scale = 1.0;

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const LayerNormForward& op);
void launch(CpuContext& context, const LayerNormBackward& op);
void launch(CpuContext& context, const L2NormForward& op);
void launch(CpuContext& context, const L2NormBackward& op);
void launch(CudaContext& context, const LayerNormForward& op);
void launch(CudaContext& context, const LayerNormBackward& op);
void launch(CudaContext& context, const L2NormForward& op);
void launch(CudaContext& context, const L2NormBackward& op);

}  // namespace moesaic
