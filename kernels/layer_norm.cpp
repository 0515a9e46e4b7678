#include "kernels/ops/layer_norm.h"

#include "kernels/checks.h"

namespace moesaic {

void LayerNormForward::check() const {
  MOESAIC_CHECK(x.rank() == 2, "x must be [rows, width]");
  check_like(y, x, "y");
  check_shape(weight, {x.dim(1)}, "weight");
  check_like(bias, weight, "bias");
  check_acc(mean, {x.dim(0)}, x.dtype(), "mean");
  check_acc(inv_std, {x.dim(0)}, x.dtype(), "inv_std");
}
OpCost LayerNormForward::cost() const {
  return {7.0 * static_cast<double>(x.numel()), total_bytes({y, x, weight, bias, mean, inv_std})};
}

void LayerNormBackward::check() const {
  MOESAIC_CHECK(x.rank() == 2, "x must be [rows, width]");
  check_like(dx, x, "dx");
  check_like(dy, x, "dy");
  check_shape(weight, {x.dim(1)}, "weight");
  check_acc(mean, {x.dim(0)}, x.dtype(), "mean");
  check_acc(inv_std, {x.dim(0)}, x.dtype(), "inv_std");
  if (!dweight.empty()) check_acc(dweight, {x.dim(1)}, x.dtype(), "dweight");
  if (!dbias.empty()) check_acc(dbias, {x.dim(1)}, x.dtype(), "dbias");
}
OpCost LayerNormBackward::cost() const {
  return {14.0 * static_cast<double>(x.numel()), total_bytes({dx, dy, x, weight})};
}

void L2NormForward::check() const {
  MOESAIC_CHECK(x.rank() == 2, "x must be [rows, width]");
  check_like(y, x, "y");
  check_acc(inv_norm, {x.dim(0)}, x.dtype(), "inv_norm");
}
OpCost L2NormForward::cost() const {
  return {3.0 * static_cast<double>(x.numel()), total_bytes({y, x, inv_norm})};
}

void L2NormBackward::check() const {
  MOESAIC_CHECK(x.rank() == 2, "x must be [rows, width]");
  check_like(dx, x, "dx");
  check_like(dy, x, "dy");
  check_acc(inv_norm, {x.dim(0)}, x.dtype(), "inv_norm");
}
OpCost L2NormBackward::cost() const {
  return {6.0 * static_cast<double>(x.numel()), total_bytes({dx, dy, x, inv_norm})};
}

}  // namespace moesaic
