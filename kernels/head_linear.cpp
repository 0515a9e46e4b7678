#include "kernels/ops/head_linear.h"

#include "kernels/checks.h"

namespace moesaic {
namespace {

void check_channels(const ConstTensorView& x,
                    std::int64_t begin,
                    std::int64_t n,
                    const char* what) {
  MOESAIC_CHECK(x.rank() == 3 && begin >= 0 && n > 0 && begin + n <= x.dim(2),
                std::string(what) + " must be [T, H, channels] and hold the named channels");
}
void check_weight(const ConstTensorView& w,
                  std::int64_t heads,
                  std::int64_t begin,
                  std::int64_t m,
                  const char* what) {
  MOESAIC_CHECK(w.rank() == 2 && heads > 0 && w.dim(0) % heads == 0,
                std::string(what) + " must be [H * block, n]");
  MOESAIC_CHECK(begin >= 0 && m > 0 && begin + m <= w.dim(0) / heads,
                std::string(what) + " must hold the named rows in every head's block");
}
void check_result(const ConstTensorView& y, DType operands, const char* what) {
  MOESAIC_CHECK(y.dtype() == operands || y.dtype() == acc_dtype(operands),
                std::string(what) + " must have the type of the operands or their wider one");
}

}  // namespace

void HeadLinear::check() const {
  check_channels(y.x, y.begin, to(), "y");
  check_channels(x.x, x.begin, from(), "x");
  MOESAIC_CHECK(y.x.dim(0) == x.x.dim(0) && y.x.dim(1) == x.x.dim(1),
                "x and y must have the same tokens and heads");
  check_weight(w, x.x.dim(1), row_begin, m, "w");
  check_dtype(w, x.x.dtype(), "w");
  check_result(y.x, x.x.dtype(), "y");
}

OpCost HeadLinear::cost() const {
  const double rows = static_cast<double>(x.x.dim(0) * x.x.dim(1));
  const double size = static_cast<double>(byte_size(x.x.dtype()));
  return {2 * rows * static_cast<double>(from() * to()),
          size * static_cast<double>(x.x.dim(1) * m * w.dim(1)) +
              rows * (size * static_cast<double>(from()) +
                      static_cast<double>(byte_size(y.x.dtype())) * static_cast<double>(to()))};
}

void HeadLinearBackwardWeight::check() const {
  check_channels(a.x, a.begin, m, "a");
  check_channels(b.x, b.begin, dw.dim(1), "b");
  MOESAIC_CHECK(a.x.dim(0) == b.x.dim(0) && a.x.dim(1) == b.x.dim(1),
                "a and b must have the same tokens and heads");
  check_dtype(b.x, a.x.dtype(), "b");
  check_weight(dw, a.x.dim(1), row_begin, m, "dw");
  check_result(dw, a.x.dtype(), "dw");
}

OpCost HeadLinearBackwardWeight::cost() const {
  const double rows = static_cast<double>(a.x.dim(0) * a.x.dim(1)),
               size = static_cast<double>(byte_size(a.x.dtype()));
  return {2 * rows * static_cast<double>(m * dw.dim(1)),
          rows * size * static_cast<double>(m + dw.dim(1)) +
              2.0 * static_cast<double>(byte_size(dw.dtype())) *
                  static_cast<double>(a.x.dim(1) * m * dw.dim(1))};
}

void CopyHeadColumns::check() const {
  check_channels(y.x, y.begin, n, "y");
  check_channels(x.x, x.begin, n, "x");
  MOESAIC_CHECK(y.x.dim(0) == x.x.dim(0) && y.x.dim(1) == x.x.dim(1),
                "x and y must have the same tokens and heads");
  check_dtype(y.x, x.x.dtype(), "y");
}

OpCost CopyHeadColumns::cost() const {
  return {0,
          2.0 * static_cast<double>(byte_size(x.x.dtype())) *
              static_cast<double>(x.x.dim(0) * x.x.dim(1) * n)};
}

}  // namespace moesaic
