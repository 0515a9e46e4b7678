#pragma once
// An f32 number as a bf16 number next to 16 more bits, for the host and for CUDA kernels: the bf16 half is what kernels
// read as a weight, both together are its master, in 4 bytes instead of 6.
#include <bit>
#include <cstdint>

#include "core/base/dtype.h"

#ifdef __CUDACC__
#define MOESAIC_SPLIT_FUNCTION __host__ __device__ static inline
#else
#define MOESAIC_SPLIT_FUNCTION static inline
#endif

namespace moesaic {

/// `weight`: the bits of the f32 number rounded to bf16, halves away from zero (half up in the magnitude); `remainder`:
/// the lower half of its bits.
///   - Every number that is not NaN, subnormals, zeros of both signs and infinities included, comes back with its bits.
///   - A finite number within half a bf16 step of 2^128 has an infinite weight, as with any rounding to nearest, and
///     comes back finite.
///   - NaN becomes the quiet NaN of its sign with remainder 0, because rounding would carry some of them into a zero.
struct SplitBits {
  std::uint16_t weight = 0;
  std::uint16_t remainder = 0;
};

MOESAIC_SPLIT_FUNCTION SplitBits split_bits(std::uint32_t bits) noexcept {
  if ((bits & 0x7fffffffU) > 0x7f800000U) bits = (bits & 0x80000000U) | 0x7fc00000U;
  SplitBits s;
  s.weight = static_cast<std::uint16_t>((bits + 0x8000U) >> 16);
  s.remainder = static_cast<std::uint16_t>(bits & 0xffffU);
  return s;
}

/// The bits that were split. Remainder 0 gives the bf16 number itself.
MOESAIC_SPLIT_FUNCTION std::uint32_t join_bits(std::uint32_t weight,
                                               std::uint32_t remainder) noexcept {
  // A remainder of half or more had rounded up, which is taken back. All of it modulo 2^32.
  return ((weight << 16) | remainder) - ((remainder & 0x8000U) << 1);
}

/// The same on the host's types.
inline float join_float(bf16 weight, std::uint16_t remainder) noexcept {
  return std::bit_cast<float>(join_bits(weight.bits, remainder));
}
inline void split_float(float value, bf16& weight, std::uint16_t& remainder) noexcept {
  const SplitBits s = split_bits(std::bit_cast<std::uint32_t>(value));
  weight.bits = s.weight;
  remainder = s.remainder;
}

}  // namespace moesaic
