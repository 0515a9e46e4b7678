#pragma once
// The k largest of a row by radix selection, for one block of threads. A pass per digit of the keys finds the k-th best; a
// pass in index order then collects what is above it and the first entries that equal it, so ties need no sort. The only
// atomics add integers: the result does not depend on their order.
#include <cstdint>

#include "kernels/cuda/device.cuh"

namespace moesaic::cuda {

constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kMaxSelectThreads = 512;  ///< largest block that may call these

template <class T>
struct KeyOf;
template <>
struct KeyOf<float> {
  using type = std::uint32_t;
};
template <>
struct KeyOf<double> {
  using type = std::uint64_t;
};
template <class T>
using key_t = typename KeyOf<T>::type;

// An integer that orders as the score does: NaN as -infinity, -0 as +0.
template <class T>
__device__ __forceinline__ key_t<T> key_of(T score) {
  using Key = key_t<T>;
  constexpr Key kSign = Key(1) << (sizeof(Key) * 8 - 1);
  if (isnan(score)) score = -INFINITY;
  if (score == T(0)) score = T(0);
  Key bits;
  if constexpr (sizeof(T) == 4) {
    bits = __float_as_uint(score);
  } else {
    bits = static_cast<Key>(__double_as_longlong(score));
  }
  return (bits & kSign) != 0 ? ~bits : bits | kSign;
}

// What the k best of a row are: all above `key`, and the first `ties` that equal it.
template <class Key>
struct Bar {
  Key key;
  int ties;
};

// From the highest digit down: warp 0 finds in the histogram the digit of the k-th best key. `k` <=
// n.
template <class T>
__device__ Bar<key_t<T>> find_bar(const T* row, int n, int k) {
  using Key = key_t<T>;
  __shared__ int histogram[kDigits];
  __shared__ int chosen_digit, chosen_above;
  Key prefix = 0, mask = 0;
  for (int shift = static_cast<int>(sizeof(Key)) * 8 - kDigitBits; shift >= 0;
       shift -= kDigitBits) {
    for (int d = threadIdx.x; d < kDigits; d += blockDim.x)
      histogram[d] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
      const Key key = key_of(row[i]);
      if ((key & mask) == prefix)
        atomicAdd(&histogram[static_cast<int>(key >> shift) & (kDigits - 1)], 1);
    }
    __syncthreads();
    if (threadIdx.x < kWarp) {
      constexpr int kPerLane =
          kDigits / kWarp;  // lane l owns the digits just below kDigits - l kPerLane
      const int lane = static_cast<int>(threadIdx.x), top = kDigits - 1 - lane * kPerLane;
      int own = 0;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j)
        own += histogram[top - j];
      int upto = own;  // inclusive scan over lanes
#pragma unroll
      for (int offset = 1; offset < kWarp; offset *= 2) {
        const int other = __shfl_up_sync(0xffffffffU, upto, offset);
        if (lane >= offset) upto += other;
      }
      int above = upto - own;
      if (above < k && k <= upto) {  // true in one lane
        int j = 0;
        while (above + histogram[top - j] < k)
          above += histogram[top - j++];
        chosen_digit = top - j;
        chosen_above = above;
      }
    }
    __syncthreads();
    prefix |= static_cast<Key>(chosen_digit) << shift;
    mask |= static_cast<Key>(kDigits - 1) << shift;
    k -= chosen_above;
  }
  return {prefix, k};
}

// Calls emit(position, key, index) for the chosen entries; positions rise with the index.
template <class T, class Emit>
__device__ void collect(const T* row, int n, int k, const Bar<key_t<T>>& bar, Emit&& emit) {
  __shared__ int above_in_warp[2][kMaxSelectThreads / kWarp],
      ties_in_warp[2][kMaxSelectThreads / kWarp];
  const int warp = static_cast<int>(threadIdx.x) / kWarp,
            num_warps = static_cast<int>(blockDim.x) / kWarp;
  const unsigned lower_lanes = (1U << (threadIdx.x % kWarp)) - 1U;
  int above = 0, ties = 0;  // before this chunk; the same in all threads
  int half =
      0;  // the two halves of the shared arrays alternate, so one barrier per chunk is enough
  for (int begin = 0; begin < n && above + min(ties, bar.ties) < k;
       begin += static_cast<int>(blockDim.x), half ^= 1) {
    const int i = begin + static_cast<int>(threadIdx.x);
    const bool inside = i < n;
    const auto key = inside ? key_of(row[i]) : key_t<T>(0);
    const bool is_above = inside && key > bar.key, is_tie = inside && key == bar.key;
    const unsigned above_mask = __ballot_sync(0xffffffffU, is_above),
                   tie_mask = __ballot_sync(0xffffffffU, is_tie);
    if (threadIdx.x % kWarp == 0) {
      above_in_warp[half][warp] = __popc(above_mask);
      ties_in_warp[half][warp] = __popc(tie_mask);
    }
    __syncthreads();
    int my_above = above + __popc(above_mask & lower_lanes),
        my_ties = ties + __popc(tie_mask & lower_lanes);
    for (int w = 0; w < num_warps; ++w) {
      if (w < warp) {
        my_above += above_in_warp[half][w];
        my_ties += ties_in_warp[half][w];
      }
      above += above_in_warp[half][w];
      ties += ties_in_warp[half][w];
    }
    if (is_above || (is_tie && my_ties < bar.ties)) emit(my_above + min(my_ties, bar.ties), key, i);
  }
}

}  // namespace moesaic::cuda
