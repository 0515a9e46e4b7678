#include "kernels/ops/qk_clip.h"

#include "kernels/checks.h"

namespace moesaic {

void QkClip::check() const {
  MOESAIC_CHECK(max_logit.rank() == 1, "max_logit must be [H]");
  MOESAIC_CHECK(dn >= 0 && dr >= 0 && dv >= 0 && tau > 0,
                "widths must not be negative and tau must be positive");
  const std::int64_t heads = max_logit.dim(0);
  const auto is_real = [](DType t) { return t == DType::f32 || t == DType::f64; };
  MOESAIC_CHECK(is_real(max_logit.dtype()), "logits are f32 or f64");
  const auto check_master = [&](const TensorView& weight, const TensorView& remainder) {
    if (!remainder.empty()) return check_split_master({}, weight, remainder);
    MOESAIC_CHECK(is_real(weight.dtype()), "QK-clip works on f32 or f64");
  };
  check_master(q_weight, q_remainder);
  check_master(kv_b_weight, kv_b_remainder);
  MOESAIC_CHECK(q_weight.rank() == 2 && kv_b_weight.rank() == 2, "weights must be matrices");
  check_shape(q_weight, {heads * (dn + dr), q_weight.dim(1)}, "q_weight");
  check_shape(kv_b_weight, {heads * (dn + dv), kv_b_weight.dim(1)}, "kv_b_weight");
  if (!gamma.empty()) {
    check_shape(gamma, {heads}, "gamma");
    check_dtype(gamma, max_logit.dtype(), "gamma");
  }
  if (!skip.empty()) {
    MOESAIC_CHECK(skip.numel() == 1 && (skip.dtype() == DType::i32 || is_real(skip.dtype())),
                  "skip must be one i32, f32 or f64");
  }
}

OpCost QkClip::cost() const {
  return {static_cast<double>(q_weight.numel() + kv_b_weight.numel()),
          2.0 * total_bytes({q_weight, kv_b_weight, q_remainder, kv_b_remainder})};
}

}  // namespace moesaic
