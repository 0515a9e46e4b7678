#include "kernels/ops/rms_norm.h"

namespace moesaic {

void RmsNormForward::check() const {
  MOESAIC_CHECK(x.rank() == 2, "x must be [tokens, hidden]");
  check_shape(y, x.shape(), "y");
  check_dtype(y, x.dtype(), "y");
  check_shape(weight, {x.dim(1)}, "weight");
  check_shape(inv_rms, {x.dim(0)}, "inv_rms");
  check_dtype(inv_rms, x.dtype() == DType::f64 ? DType::f64 : DType::f32, "inv_rms");
}

OpCost RmsNormForward::cost() const {
  return {4.0 * static_cast<double>(x.numel()),
          static_cast<double>(x.bytes() + y.bytes() + weight.bytes() + inv_rms.bytes())};
}

void RmsNormBackward::check() const {
  MOESAIC_CHECK(x.rank() == 2, "x must be [tokens, hidden]");
  check_shape(dx, x.shape(), "dx");
  check_shape(dy, x.shape(), "dy");
  check_dtype(dx, x.dtype(), "dx");
  check_dtype(dy, x.dtype(), "dy");
  check_shape(weight, {x.dim(1)}, "weight");
  if (!dweight.empty()) check_shape(dweight, {x.dim(1)}, "dweight");
  check_shape(inv_rms, {x.dim(0)}, "inv_rms");
}

OpCost RmsNormBackward::cost() const {
  return {8.0 * static_cast<double>(x.numel()),
          static_cast<double>(x.bytes() + dy.bytes() + dx.bytes() + weight.bytes())};
}

}  // namespace moesaic
