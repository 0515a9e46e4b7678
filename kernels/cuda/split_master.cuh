#pragma once
// Split masters (core/base/split_float.h) in registers.
#include "core/base/split_float.h"
#include "kernels/cuda/device.cuh"

namespace moesaic::cuda {

__device__ __forceinline__ float join_master(__nv_bfloat16 weight, std::uint16_t remainder) {
  return __uint_as_float(join_bits(__bfloat16_as_ushort(weight), remainder));
}
__device__ __forceinline__ void split_master(float value,
                                             __nv_bfloat16& weight,
                                             std::uint16_t& remainder) {
  const SplitBits s = split_bits(__float_as_uint(value));
  weight = __ushort_as_bfloat16(s.weight);
  remainder = s.remainder;
}

template <int N>
__device__ __forceinline__ Vec<float, N> load_joined(const __nv_bfloat16* weight,
                                                     const std::uint16_t* remainder) {
  const auto high = load<N>(weight);
  const auto low = load<N>(remainder);
  Vec<float, N> joined;
#pragma unroll
  for (int i = 0; i < N; ++i)
    joined.v[i] = join_master(high.v[i], low.v[i]);
  return joined;
}
template <int N>
__device__ __forceinline__ void store_split(__nv_bfloat16* weight,
                                            std::uint16_t* remainder,
                                            const Vec<float, N>& values) {
  Vec<__nv_bfloat16, N> high;
  Vec<std::uint16_t, N> low;
#pragma unroll
  for (int i = 0; i < N; ++i)
    split_master(values.v[i], high.v[i], low.v[i]);
  store<N>(weight, high);
  store<N>(remainder, low);
}

}  // namespace moesaic::cuda
