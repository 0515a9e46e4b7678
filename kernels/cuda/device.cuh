#pragma once
// Device code shared by the kernels: element types, vector access, sums over a warp or a block in a
// fixed order.
#include <cstdint>

#include <cuda_bf16.h>

#include "core/base/dtype.h"

namespace moesaic::cuda {

/// The device's name for an element type; same bits.
template <class T>
struct device_type {
  using type = T;
};
template <>
struct device_type<bf16> {
  using type = __nv_bfloat16;
};
template <class T>
using device_t = typename device_type<T>::type;

template <class A, class T>
__device__ __forceinline__ A widen(T x) {
  return static_cast<A>(x);
}
template <>
__device__ __forceinline__ float widen<float, __nv_bfloat16>(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
template <>
__device__ __forceinline__ double widen<double, __nv_bfloat16>(__nv_bfloat16 x) {
  return static_cast<double>(__bfloat162float(x));
}
/// To the nearest T, ties to even; double to bf16 goes by float, as the host's bf16 does.
template <class T, class A>
__device__ __forceinline__ T round_to(A x) {
  return static_cast<T>(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 round_to<__nv_bfloat16, float>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 round_to<__nv_bfloat16, double>(double x) {
  return __float2bfloat16_rn(static_cast<float>(x));
}

/// N neighbouring elements, moved in accesses of up to 16 bytes.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
  T v[N];
};
template <int N, class T>
__device__ __forceinline__ Vec<T, N> load(const T* p) {
  return *reinterpret_cast<const Vec<T, N>*>(p);
}
template <int N, class T>
__device__ __forceinline__ void store(T* p, const Vec<T, N>& x) {
  *reinterpret_cast<Vec<T, N>*>(p) = x;
}

constexpr int kWarp = 32;

/// Sum over the warp, the same bits in every lane.
template <class A>
__device__ __forceinline__ A warp_sum(A x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    x += __shfl_xor_sync(0xffffffffU, x, offset);
  return x;
}

/// Sum over the Threads threads that share a row: a warp, or the whole block (then every thread
/// must call it).
template <int Threads, class A>
__device__ __forceinline__ A row_sum(A x) {
  x = warp_sum(x);
  if constexpr (Threads > kWarp) {
    constexpr int kWarps = Threads / kWarp;
    __shared__ A partial[kWarps];
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = x;
    __syncthreads();
    x = partial[0];
#pragma unroll
    for (int i = 1; i < kWarps; ++i)
      x += partial[i];
    __syncthreads();  // the next row writes partial again
  }
  return x;
}

}  // namespace moesaic::cuda
