#include "kernels/ops/gated_norm.h"

#include "kernels/checks.h"

namespace moesaic {

void GatedRmsNormForward::check() const {
  MOESAIC_CHECK(x.rank() == 3, "x must be [tokens, heads, width]");
  check_like(y, x, "y");
  check_like(gate, x, "gate");
  check_shape(weight, {x.dim(2)}, "weight");
  check_acc(inv_rms, {x.dim(0), x.dim(1)}, x.dtype(), "inv_rms");
}
OpCost GatedRmsNormForward::cost() const {
  return {10.0 * static_cast<double>(x.numel()), total_bytes({y, x, gate, weight, inv_rms})};
}

void GatedRmsNormBackward::check() const {
  MOESAIC_CHECK(x.rank() == 3, "x must be [tokens, heads, width]");
  check_like(dx, x, "dx");
  check_like(dgate, x, "dgate");
  check_like(dy, x, "dy");
  check_like(gate, x, "gate");
  check_shape(weight, {x.dim(2)}, "weight");
  check_acc(inv_rms, {x.dim(0), x.dim(1)}, x.dtype(), "inv_rms");
  if (!dweight.empty()) check_acc(dweight, {x.dim(2)}, x.dtype(), "dweight");
}
OpCost GatedRmsNormBackward::cost() const {
  return {24.0 * static_cast<double>(x.numel()),
          total_bytes({dx, dgate, dy, x, gate, weight, inv_rms})};
}

void SigmoidGateForward::check() const {
  check_like(y, x, "y");
  check_like(gate, x, "gate");
}
OpCost SigmoidGateForward::cost() const {
  return {5.0 * static_cast<double>(x.numel()), total_bytes({y, x, gate})};
}

void SigmoidGateBackward::check() const {
  check_like(dx, x, "dx");
  check_like(dgate, x, "dgate");
  check_like(dy, x, "dy");
  check_like(gate, x, "gate");
}
OpCost SigmoidGateBackward::cost() const {
  return {8.0 * static_cast<double>(x.numel()), total_bytes({dx, dgate, dy, x, gate})};
}

}  // namespace moesaic
