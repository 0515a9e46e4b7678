#include "kernels/ops/elementwise.h"

#include "kernels/checks.h"

namespace moesaic {
namespace {
void check_float(const ConstTensorView& view, const char* what) {
  const DType t = view.dtype();
  MOESAIC_CHECK(t == DType::f64 || t == DType::f32 || t == DType::bf16,
                std::string(what) + " must be f64, f32 or bf16");
}
}  // namespace

void Add::check() const {
  check_float(y, "y");
  check_like(a, y, "a");
  check_like(b, y, "b");
}
OpCost Add::cost() const {
  return {static_cast<double>(y.numel()), total_bytes({y, a, b})};
}

void Accumulate::check() const {
  check_float(y, "y");
  check_float(x, "x");
  check_shape(x, y.shape(), "x");
}
OpCost Accumulate::cost() const {
  return {2.0 * static_cast<double>(y.numel()), total_bytes({y, y, x})};
}

void Cast::check() const {
  check_float(y, "y");
  check_float(x, "x");
  check_shape(x, y.shape(), "x");
}
OpCost Cast::cost() const {
  return {0.0, total_bytes({y, x})};
}

void Fill::check() const {
  if (y.dtype() != DType::i32) check_float(y, "y");
}
OpCost Fill::cost() const {
  return {0.0, total_bytes({y})};
}

void Scale::check() const {
  check_float(y, "y");
  check_like(x, y, "x");
  if (!factor.empty()) check_scalar(factor, y.dtype(), "factor");
}
OpCost Scale::cost() const {
  return {static_cast<double>(y.numel()), total_bytes({y, x})};
}

}  // namespace moesaic
