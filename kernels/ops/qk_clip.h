#pragma once
#include "kernels/ops/op.h"

namespace moesaic {

/// QK-clip: for heads whose largest logit S_h of the step exceeds tau, scales the projections so
/// that the logits become gamma_h = tau / S_h times the old ones. In place, on master weights:
///
///   q rows 0..dn of the head and key rows 0..dn of the head in kv_b  *= sqrt(gamma_h)
///   the dr query rows that meet the shared key                       *= gamma_h;   value rows stay
///
///   q_weight    [H (dn+dr), in]   f64 | f32: q_b_proj or q_proj
///   kv_b_weight [H (dn+dv), ckv]  f64 | f32
///   q_remainder, kv_b_remainder   u16, optional, like the weight that each belongs to, which then is bf16: together an
///   f32 master (core/base/split_float.h)
///   max_logit   [H]               f64 | f32; the maximum over the global batch
///   gamma       [H]               optional, type of max_logit: the factors used (1 = not clipped),
///   for the log skip        one element, i32 | f32 | f64, optional: not zero = leave the weights
///   alone (a skipped step); gamma is 1
///
/// A non-finite S_h leaves its head alone. Source: SPEC section 7.4.
struct QkClip {
  static constexpr const char* kName = "qk_clip";
  TensorView q_weight;
  TensorView kv_b_weight;
  TensorView q_remainder = {};
  TensorView kv_b_remainder = {};
  TensorView gamma;
  ConstTensorView max_logit;
  ConstTensorView skip;
  std::int64_t dn = 0;
  std::int64_t dr = 0;
  std::int64_t dv = 0;
  double tau = 100.0;

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const QkClip& op);
void launch(CudaContext& context, const QkClip& op);

}  // namespace moesaic
