#pragma once
#include <array>
#include <cstdint>
#include <string_view>

namespace moesaic {

/// Philox4x32-10 (Salmon et al., SC'11): four 32-bit words as a pure function of a key and a 128-bit counter. Nothing
/// is state, so that any layout, thread count or restart draws the same numbers.
std::array<std::uint32_t, 4> philox(std::uint64_t key,
                                    std::uint64_t counter_low,
                                    std::uint64_t counter_high) noexcept;

/// 64-bit FNV-1a of a name, to give every tensor and purpose its own stream.
std::uint64_t hash_name(std::string_view name) noexcept;

/// SplitMix64 finaliser: a bijection of 64 bits.
std::uint64_t mix64(std::uint64_t x) noexcept;

/// Uniform in [0, 1) with 53 bits, as a pure function of (key, index).
double uniform(std::uint64_t key, std::uint64_t index) noexcept;

/// Standard normal as a pure function of (key, index): the inverse of the normal distribution applied to `uniform`
/// (Wichura, algorithm AS 241). It uses + - * / sqrt and a software logarithm only, so the bits do not depend on the C
/// library.
double standard_normal(std::uint64_t key, std::uint64_t index) noexcept;

/// log x for normal x > 0 and e^x for |x| <= 700, relative error below 1e-13, from + - * / alone: for initial values, whose
/// bits must not depend on the C library.
double portable_log(double x) noexcept;
double portable_exp(double x) noexcept;

}  // namespace moesaic
