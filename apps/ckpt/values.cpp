#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include <fmt/format.h>

#include "apps/ckpt/ckpt.h"

namespace moesaic::apps {
namespace {

template <class T>
T load(const std::byte* data, std::int64_t i) {
  T value{};
  std::memcpy(&value, data + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
  return value;
}

// A small float: sign, exponent, mantissa bits; `has_infinity` as in IEEE, else only all ones is NaN (e4m3).
double small_float(unsigned bits, int exponent_bits, int mantissa_bits, bool has_infinity) {
  const unsigned mantissa = bits & ((1U << mantissa_bits) - 1);
  const unsigned top = (1U << exponent_bits) - 1;
  const unsigned exponent = (bits >> mantissa_bits) & top;
  const double sign = (bits >> (exponent_bits + mantissa_bits)) != 0 ? -1 : 1;
  const int bias = static_cast<int>(top / 2);
  if (exponent == top && has_infinity)
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  if (exponent == top && mantissa == (1U << mantissa_bits) - 1)
    return std::numeric_limits<double>::quiet_NaN();
  const double fraction = static_cast<double>(mantissa) / (1U << mantissa_bits);
  return exponent == 0 ? sign * std::ldexp(fraction, 1 - bias)
                       : sign * std::ldexp(1 + fraction, static_cast<int>(exponent) - bias);
}

}  // namespace

double value_at(const std::byte* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::f64:
      return load<double>(data, i);
    case DType::f32:
      return static_cast<double>(load<float>(data, i));
    case DType::bf16:
      return static_cast<double>(static_cast<float>(load<bf16>(data, i)));
    case DType::f16:
      return small_float(load<std::uint16_t>(data, i), 5, 10, true);
    case DType::e4m3:
      return small_float(load<std::uint8_t>(data, i), 4, 3, false);
    case DType::e5m2:
      return small_float(load<std::uint8_t>(data, i), 5, 2, true);
    case DType::i64:
      return static_cast<double>(load<std::int64_t>(data, i));
    case DType::i32:
      return load<std::int32_t>(data, i);
    case DType::u16:
      return load<std::uint16_t>(data, i);
    case DType::u8:
      return load<std::uint8_t>(data, i);
  }
  return 0;
}

std::string binary_bytes(double bytes) {
  constexpr std::array<const char*, 5> kUnits{"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < kUnits.size(); ++unit)
    bytes /= 1024;
  return fmt::format("{:.{}f} {}", bytes, unit == 0 ? 0 : 2, kUnits[unit]);
}

}  // namespace moesaic::apps
