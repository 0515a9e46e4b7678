#include "kernels/ops/initial_values.h"

#include "kernels/checks.h"

namespace moesaic {

void InitialValues::check() const {
  const auto floating = [](const ConstTensorView& view) {
    const DType t = view.dtype();
    return t == DType::f64 || t == DType::f32 || t == DType::bf16;
  };
  MOESAIC_CHECK(floating(y), "y must be f64, f32 or bf16");
  if (!remainder.empty()) check_split_master(copy, y, remainder);
  if (copy.empty()) return;
  MOESAIC_CHECK(floating(copy), "copy must be f64, f32 or bf16");
  check_shape(copy, y.shape(), "copy");
}

OpCost InitialValues::cost() const {
  return {0.0, total_bytes({y, copy, remainder})};
}

}  // namespace moesaic
