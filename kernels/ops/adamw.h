#pragma once
#include "kernels/ops/op.h"
#include "kernels/ops/step_scalars.h"

namespace moesaic {

/// One AdamW update of a tensor (or of the flat range of one that this rank owns):
///   g = clip_factor dw
///   m <- beta1 m + (1 - beta1) g            v <- beta2 v + (1 - beta2) g^2
///   w <- w - learning_rate lr_scale ( (m / c1) / (sqrt(v / c2) + eps) + weight_decay
///   weight_decay_scale w ) w_compute <- w, rounded
/// with clip_factor, learning_rate, weight_decay_scale, c1, c2 (bias corrections) and skip from
/// `scalars`.
///
///   w, m, v     any one shape, f64 | f32 (the master dtype, also the type of the arithmetic);
///   updated in place dw          the same shape; master dtype, or bf16 next to f32; read only
///   w_compute   the same shape; master dtype, or bf16 next to f32; empty = none wanted
///   remainder   the same shape, u16, or empty. When given, the f32 master is the pair (w_compute, remainder) of
///   core/base/split_float.h, updated in place: w is empty and w_compute, bf16, is required
///   scalars     [kNumStepScalars], master dtype
///
/// With skip != 0 nothing is written, whatever dw holds. No two tensors overlap. Elementwise, so
/// the bits of an element depend neither on the split into ranges nor on threads. Source:
/// Loshchilov & Hutter, arXiv:1711.05101 algorithm 2, in PyTorch's form (eps outside the corrected
/// root); SPEC section 7.1.
struct AdamW {
  static constexpr const char* kName = "adamw";
  TensorView w = {};
  TensorView m;
  TensorView v;
  TensorView w_compute = {};
  TensorView remainder = {};
  ConstTensorView dw;
  ConstTensorView scalars;
  double lr_scale = 1;
  double weight_decay = 0;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;

  bool is_split() const { return !remainder.empty(); }
  /// A tensor with the shape of the master, and the master's type.
  const TensorView& shaped() const { return is_split() ? w_compute : w; }
  DType master_dtype() const { return is_split() ? DType::f32 : w.dtype(); }
  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const AdamW& op);
void launch(CudaContext& context, const AdamW& op);

}  // namespace moesaic
