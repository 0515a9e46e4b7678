#include "kernels/ops/gemm.h"

#include <fmt/format.h>

namespace moesaic {

void Gemm::check() const {
  MOESAIC_CHECK(c.rank() == 2 && a.rank() == 2 && b.rank() == 2, "gemm takes matrices");
  const std::int64_t depth = k();
  const Shape want_a = transpose_a ? Shape{depth, m()} : Shape{m(), depth};
  const Shape want_b = transpose_b ? Shape{n(), depth} : Shape{depth, n()};
  check_shape(a, want_a, "a");
  check_shape(b, want_b, "b");
  check_dtype(b, a.dtype(), "b");
  const DType wide = a.dtype() == DType::f64 ? DType::f64 : DType::f32;
  MOESAIC_CHECK(c.dtype() == a.dtype() || c.dtype() == wide,
                fmt::format("c is {}, operands are {}", name(c.dtype()), name(a.dtype())));
}

OpCost Gemm::cost() const {
  return {2.0 * static_cast<double>(m()) * static_cast<double>(n()) * static_cast<double>(k()),
          static_cast<double>(a.bytes() + b.bytes() + c.bytes() * (accumulate ? 2 : 1))};
}

}  // namespace moesaic
