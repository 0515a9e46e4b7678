#include "kernels/ops/qk_clip.h"

namespace moesaic {

void QkClip::check() const {
  MOESAIC_CHECK(max_logit.rank() == 1, "max_logit must be [H]");
  MOESAIC_CHECK(dn >= 0 && dr >= 0 && dv >= 0 && tau > 0,
                "widths must not be negative and tau must be positive");
  const std::int64_t heads = max_logit.dim(0);
  const auto is_real = [](DType t) { return t == DType::f32 || t == DType::f64; };
  MOESAIC_CHECK(
      is_real(max_logit.dtype()) && is_real(q_weight.dtype()) && is_real(kv_b_weight.dtype()),
      "QK-clip works on f32 or f64");
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
          2.0 * static_cast<double>(q_weight.bytes() + kv_b_weight.bytes())};
}

}  // namespace moesaic
