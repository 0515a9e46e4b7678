#include "kernels/ops/rope.h"

#include "kernels/checks.h"

namespace moesaic {

void Rope::check() const {
  MOESAIC_CHECK(x.rank() == 3, "x must be [tokens, heads, width]");
  check_shape(positions, {x.dim(0)}, "positions");
  check_dtype(positions, DType::i32, "positions");
  MOESAIC_CHECK(rotary_width >= 0 && rotary_width % 2 == 0 && rotary_width <= 1024,
                "rotary_width must be even and at most 1024");
  MOESAIC_CHECK(begin >= 0 && begin + rotary_width <= x.dim(2), "rotated columns outside x");
  MOESAIC_CHECK(theta > 0, "theta must be positive");
}

OpCost Rope::cost() const {
  const double elements = static_cast<double>(x.dim(0)) * static_cast<double>(x.dim(1)) *
                          static_cast<double>(rotary_width);
  return {3.0 * elements, 2.0 * elements * static_cast<double>(byte_size(x.dtype()))};
}

}  // namespace moesaic
