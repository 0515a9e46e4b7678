#include "kernels/ops/clip.h"

#include <fmt/format.h>

#include "kernels/checks.h"

namespace moesaic {

void SumOfSquares::check() const {
  MOESAIC_CHECK(partials.rank() == 1 && partials.dim(0) >= 1, "partials must be [n]");
  check_dtype(partials, DType::f64, "partials");
  if (!index.empty()) {
    check_dtype(index, DType::i32, "index");
    MOESAIC_CHECK(index.rank() == 1 && index.dim(0) <= partials.dim(0),
                  "index must be [n], with no more sums than partials");
  }
  MOESAIC_CHECK(x.numel() % sums() == 0,
                fmt::format("{} elements do not split into {} sums", x.numel(), sums()));
  MOESAIC_CHECK(x.dtype() == DType::f64 || x.dtype() == DType::f32 || x.dtype() == DType::bf16,
                "x must be f64, f32 or bf16");
}
OpCost SumOfSquares::cost() const {
  return {2.0 * static_cast<double>(x.numel()), static_cast<double>(x.bytes())};
}

void ClipFactor::check() const {
  MOESAIC_CHECK(scalars.dtype() == DType::f64 || scalars.dtype() == DType::f32,
                "scalars must be f64 or f32");
  check_step_scalars(scalars, scalars.dtype());
  MOESAIC_CHECK(norm.numel() == 1, "norm must be one element");
  check_dtype(norm, DType::f64, "norm");
  MOESAIC_CHECK(partials.rank() == 1, "partials must be [n]");
  check_dtype(partials, DType::f64, "partials");
  MOESAIC_CHECK(limit >= 0, "negative limit");
}
OpCost ClipFactor::cost() const {
  return {static_cast<double>(partials.numel()), static_cast<double>(partials.bytes())};
}

void MovingAverage::check() const {
  if (remainder.empty()) {
    MOESAIC_CHECK(w.dtype() == DType::f64 || w.dtype() == DType::f32, "w must be f64 or f32");
    check_dtype(average, w.dtype(), "average");
  } else {
    check_split_master({}, w, remainder);
    check_dtype(average, DType::f32, "average");
  }
  check_shape(average, w.shape(), "average");
  if (!scalars.empty()) check_step_scalars(scalars, average.dtype());
}
OpCost MovingAverage::cost() const {
  return {3.0 * static_cast<double>(w.numel()), 3.0 * static_cast<double>(average.bytes())};
}

}  // namespace moesaic
