#pragma once
// Unsigned integers with the order of the floats, for kernels that choose: NaN counts as -infinity,
// -0 equals +0. No float has key 0, so 0 stands for "not there".
#include <cstdint>

#include "kernels/cuda/device.cuh"

namespace moesaic::cuda {

template <class A>
struct OrderKey;
template <>
struct OrderKey<float> {
  using Key = std::uint32_t;
  static __device__ __forceinline__ Key of(float x) {
    if (!(x == x)) x = -INFINITY;
    const Key u = __float_as_uint(x + 0.0F);
    return (u >> 31) != 0 ? ~u : u | 0x80000000U;
  }
  static __device__ __forceinline__ float value(Key key) {
    return __uint_as_float((key >> 31) != 0 ? key & 0x7fffffffU : ~key);
  }
};
template <>
struct OrderKey<double> {
  using Key = std::uint64_t;
  static constexpr Key kSign = Key{1} << 63;
  static __device__ __forceinline__ Key of(double x) {
    if (!(x == x)) x = -INFINITY;
    const auto u = static_cast<Key>(__double_as_longlong(x + 0.0));
    return (u & kSign) != 0 ? ~u : u | kSign;
  }
  static __device__ __forceinline__ double value(Key key) {
    return __longlong_as_double(static_cast<long long>((key & kSign) != 0 ? key & ~kSign : ~key));
  }
};
template <class A>
using order_key_t = typename OrderKey<A>::Key;

/// The largest key of the warp.
__device__ __forceinline__ std::uint32_t warp_max_key(std::uint32_t key) {
  return __reduce_max_sync(0xffffffffU, key);
}
__device__ __forceinline__ std::uint64_t warp_max_key(std::uint64_t key) {
  const auto high = static_cast<std::uint32_t>(key >> 32), low = static_cast<std::uint32_t>(key);
  const std::uint32_t top = __reduce_max_sync(0xffffffffU, high);
  const std::uint32_t rest = __reduce_max_sync(0xffffffffU, high == top ? low : 0U);
  return std::uint64_t{top} << 32 | rest;
}

/// The best (key, index) of the warp: the largest key, then the lowest index. All lanes get it.
template <class Key>
__device__ __forceinline__ void warp_best(Key& key, std::uint32_t& index) {
  const Key best = warp_max_key(key);
  index = __reduce_min_sync(0xffffffffU, key == best ? index : 0xffffffffU);
  key = best;
}

}  // namespace moesaic::cuda
