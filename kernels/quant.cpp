#include "kernels/ops/quant.h"

#include <algorithm>
#include <cmath>

#include "kernels/checks.h"

namespace moesaic {

double e2m1_decode(std::uint8_t code) noexcept {
  constexpr double kValues[8] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
  const double v = kValues[code & 7];
  return (code & 8) != 0 ? -v : v;
}

std::uint8_t e2m1_encode(double x) noexcept {
  const double a = std::abs(x);
  // Midpoints between neighbours; a tie goes to the even code, i.e. up from an odd one.
  const int code =
      (a > 0.25) + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5) + (a > 5.0);
  return static_cast<std::uint8_t>(code | (std::signbit(x) ? 8 : 0));
}

double e4m3_decode(std::uint8_t code) noexcept {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return std::nan("");
  const double v =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -v : v;
}

std::uint8_t e4m3_encode(double x) noexcept {
  if (std::isnan(x)) return 0x7f;
  const double a = std::min(std::abs(x), 448.0);
  int exponent = 0;
  std::frexp(a, &exponent);               // a = f 2^exponent, f in [0.5, 1)
  exponent = std::max(exponent - 1, -6);  // below 2^-6 the steps stay 2^-9
  const int steps = static_cast<int>(
      std::nearbyint(std::ldexp(a, 3 - exponent)));  // 8 .. 16, or less when subnormal
  // 16 steps carry into the exponent by themselves: the code is a plain integer count above the subnormals.
  const int code = steps < 8 ? steps : ((exponent + 7) << 3) + (steps - 8);
  return static_cast<std::uint8_t>(code | (std::signbit(x) ? 0x80 : 0));
}

double e8m0_decode(std::uint8_t code) noexcept {
  return code == 255 ? std::nan("") : std::ldexp(1.0, code - 127);
}

namespace {

void check_mx(const ConstTensorView& values, const ConstTensorView& scales, std::int64_t group) {
  MOESAIC_CHECK(values.rank() == 2 && group > 0 && values.dim(1) % group == 0,
                "columns must be whole groups");
  check_shape(scales, {values.dim(0), values.dim(1) / group}, "scales");
  check_dtype(scales, DType::u8, "scales");
}

void check_codes(const ConstTensorView& codes, const Shape& shape, const char* what) {
  if (codes.empty()) return;
  check_shape(codes, shape, what);
  check_dtype(codes, DType::u8, what);
}

void check_packed(const ConstTensorView& packed, const ConstTensorView& values, MxFormat format) {
  if (packed.empty()) return;
  MOESAIC_CHECK(format == MxFormat::mxfp4 && values.dim(1) % 2 == 0,
                "only four-bit codes of even rows are packed");
  check_codes(packed, {values.dim(0), values.dim(1) / 2}, "packed");
}

void check_fp8_scales(const ConstTensorView& values,
                      const ConstTensorView& scales,
                      std::int64_t rows,
                      std::int64_t cols) {
  MOESAIC_CHECK(values.rank() == 2 && rows > 0 && cols > 0,
                "values must be a matrix and blocks not empty");
  check_acc(scales,
            {(values.dim(0) + rows - 1) / rows, (values.dim(1) + cols - 1) / cols},
            values.dtype(),
            "scales");
}

}  // namespace

void QuantizeMx::check() const {
  check_mx(x, scales, group);
  check_codes(codes, x.shape(), "codes");
  check_packed(packed, x, format);
  if (!dequant.empty()) check_like(dequant, x, "dequant");
}
OpCost QuantizeMx::cost() const {
  return {4.0 * static_cast<double>(x.numel()), total_bytes({x, scales, codes, packed, dequant})};
}

void DequantizeMx::check() const {
  check_mx(y, scales, group);
  MOESAIC_CHECK(codes.empty() != packed.empty(), "either codes or packed");
  check_codes(codes, y.shape(), "codes");
  check_packed(packed, y, format);
}
OpCost DequantizeMx::cost() const {
  return {static_cast<double>(y.numel()), total_bytes({y, scales, codes, packed})};
}

void QuantizeFp8Block::check() const {
  check_fp8_scales(x, scales, block_rows, block_cols);
  MOESAIC_CHECK(!codes.empty() || !dequant.empty(), "codes or dequant must be given");
  check_codes(codes, x.shape(), "codes");
  if (!dequant.empty()) check_like(dequant, x, "dequant");
}
OpCost QuantizeFp8Block::cost() const {
  return {4.0 * static_cast<double>(x.numel()), total_bytes({x, scales, codes, dequant})};
}

void DequantizeFp8Block::check() const {
  check_fp8_scales(y, scales, block_rows, block_cols);
  MOESAIC_CHECK(!codes.empty(), "codes must be given");
  check_codes(codes, y.shape(), "codes");
}
OpCost DequantizeFp8Block::cost() const {
  return {static_cast<double>(y.numel()), total_bytes({y, scales, codes})};
}

}  // namespace moesaic
