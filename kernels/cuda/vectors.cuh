#pragma once
// Host side of vector access: device pointers of views, and the choice between 16-byte and single elements.
#include <bit>
#include <initializer_list>
#include <type_traits>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"

namespace moesaic::cuda {

/// The pointer of a view as kernels want it; null for an empty view.
template <class T>
device_t<T>* device_data(const TensorView& view) {
  return reinterpret_cast<device_t<T>*>(view.as<T>());
}
template <class T>
const device_t<T>* device_data(const ConstTensorView& view) {
  return reinterpret_cast<const device_t<T>*>(view.as<T>());
}

/// Elements in 16 bytes.
template <class T>
constexpr int kWide = static_cast<int>(16 / sizeof(T));

inline bool all_aligned(std::initializer_list<const void*> pointers) {
  bool aligned = true;
  for (const void* p : pointers)
    aligned = aligned && is_aligned(p, 16);
  return aligned;
}

/// Calls f(std::integral_constant<int, n>) with n = Wide elements per access when every row of `columns` elements starts
/// aligned (null pointers count as aligned), else 1.
template <int Wide, class F>
void with_vector(std::int64_t columns, std::initializer_list<const void*> pointers, F&& f) {
  if (columns % Wide == 0 && all_aligned(pointers)) return f(std::integral_constant<int, Wide>{});
  f(std::integral_constant<int, 1>{});
}

/// Sum over the Lanes (a power of two, at most a warp) neighbouring threads that share a row; the same bits in each of them.
template <int Lanes, class A>
__device__ __forceinline__ A lanes_sum(A x) {
  static_assert(Lanes <= kWarp && (Lanes & (Lanes - 1)) == 0);
  unsigned mask = 0xffffffffU;
  if constexpr (Lanes < kWarp) {
    const unsigned first = threadIdx.x % kWarp / Lanes * Lanes;
    mask = ((1U << Lanes) - 1U) << first;
  }
#pragma unroll
  for (int offset = Lanes / 2; offset > 0; offset /= 2)
    x += __shfl_xor_sync(mask, x, offset);
  return x;
}
/// The same for any number of threads per row that divides the block; beyond a warp every thread of the block calls it.
template <int Threads, class A>
__device__ __forceinline__ A shared_row_sum(A x) {
  if constexpr (Threads <= kWarp) {
    return lanes_sum<Threads>(x);
  } else {
    return row_sum<Threads>(x);
  }
}

}  // namespace moesaic::cuda
