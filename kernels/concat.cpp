#include "kernels/ops/concat.h"

namespace moesaic {
namespace {
void check_columns(const ConstTensorView& whole,
                   const ConstTensorView& a,
                   const ConstTensorView& b) {
  MOESAIC_CHECK(a.rank() == 2 && b.rank() == 2 && a.dim(0) == b.dim(0),
                "a and b must be [tokens, …]");
  check_shape(whole, {a.dim(0), a.dim(1) + b.dim(1)}, "y");
  check_dtype(a, whole.dtype(), "a");
  check_dtype(b, whole.dtype(), "b");
}
}  // namespace

void ConcatColumns::check() const {
  check_columns(y, a, b);
}
OpCost ConcatColumns::cost() const {
  return {0, 2.0 * static_cast<double>(y.bytes())};
}
void SplitColumns::check() const {
  check_columns(y, a, b);
}
OpCost SplitColumns::cost() const {
  return {0, 2.0 * static_cast<double>(y.bytes())};
}

}  // namespace moesaic
