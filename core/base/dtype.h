#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "core/base/error.h"

namespace moesaic {

enum class DType : std::uint8_t { f64, f32, bf16, f16, e4m3, e5m2, i64, i32, u8, u16 };

std::size_t byte_size(DType dtype) noexcept;
const char* name(DType dtype) noexcept;
inline bool is_floating(DType t) noexcept {
  return t <= DType::e5m2;
}

/// bfloat16: the upper half of a float. Conversion from float rounds to nearest, ties to even; NaN stays NaN.
struct bf16 {
  std::uint16_t bits = 0;
  bf16() = default;
  explicit bf16(float f) noexcept {
    const auto u = std::bit_cast<std::uint32_t>(f);
    // A NaN whose payload sits in the lower half would otherwise round to infinity.
    bits = (u & 0x7fffffffU) > 0x7f800000U
               ? static_cast<std::uint16_t>((u >> 16) | 0x40U)
               : static_cast<std::uint16_t>((u + 0x7fffU + ((u >> 16) & 1U)) >> 16);
  }
  explicit bf16(double d) noexcept : bf16(static_cast<float>(d)) {}
  operator float() const noexcept {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }  // NOLINT
};

template <class T>
inline constexpr DType dtype_of = DType::u8;
template <>
inline constexpr DType dtype_of<double> = DType::f64;
template <>
inline constexpr DType dtype_of<float> = DType::f32;
template <>
inline constexpr DType dtype_of<bf16> = DType::bf16;
template <>
inline constexpr DType dtype_of<std::int64_t> = DType::i64;
template <>
inline constexpr DType dtype_of<std::int32_t> = DType::i32;
template <>
inline constexpr DType dtype_of<std::uint8_t> = DType::u8;
template <>
inline constexpr DType dtype_of<std::uint16_t> = DType::u16;

/// The type in which sums over elements of T are formed: f64 for f64, else f32. Statistics and parameter gradients next
/// to activations of type T always have this type.
template <class T>
using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
struct TypeTag {
  using type = T;
};

/// Calls f(TypeTag<T>{}) for the floating element type of `dtype` (f64, f32 or bf16).
template <class F>
decltype(auto) dispatch_float(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f64:
      return f(TypeTag<double>{});
    case DType::f32:
      return f(TypeTag<float>{});
    case DType::bf16:
      return f(TypeTag<bf16>{});
    default:
      check_failed(__FILE__,
                   __LINE__,
                   "f64 | f32 | bf16",
                   std::string("no CPU kernel for dtype ") + name(dtype));
  }
}

/// Calls f(TypeTag<W>{}) for the type of a weight next to activations of type T: T itself, or its wider acc_t<T> (weights
/// that stay in f32 in a bf16 model).
template <class T, class F>
decltype(auto) dispatch_weight(DType dtype, F&& f) {
  if (dtype == dtype_of<T>) return f(TypeTag<T>{});
  MOESAIC_CHECK(dtype == dtype_of<acc_t<T>>,
                std::string("weight of dtype ") + name(dtype) + " next to activations of " +
                    name(dtype_of<T>));
  return f(TypeTag<acc_t<T>>{});
}

/// The dtypes a run uses, given to modules, store and optimizers when they are built. No module names a type.
///   f64  = all f64 (the oracle)      f32 = all f32      bf16 = bf16 compute; f32 statistics, gradients and masters
struct Precision {
  DType compute = DType::f32;  ///< activations and the weights that kernels read
  DType stats =
      DType::f32;  ///< norms' statistics, log-sum-exp, router, decay gates, states, scalars
  DType grad = DType::f32;    ///< parameter gradients
  DType master = DType::f32;  ///< master weights and optimizer moments
  /// Masters of bf16 weights are kept as the weight and 16 more bits (core/base/split_float.h); with f32 masters only.
  bool split_masters = false;
  bool operator==(const Precision&) const = default;
};
constexpr Precision kF64{DType::f64, DType::f64, DType::f64, DType::f64};
constexpr Precision kF32{DType::f32, DType::f32, DType::f32, DType::f32};
constexpr Precision kBf16{DType::bf16, DType::f32, DType::f32, DType::f32};
/// "f64" | "f32" | "bf16"; throws UsageError for another text.
Precision precision_from_name(const std::string& text);

}  // namespace moesaic
