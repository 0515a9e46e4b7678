// Top-k: one block per row. A radix selection finds the k-th best key digit by digit; a pass in
// index order then collects what is above it and the first entries that equal it, so ties need no
// sort. best_first sorts the k chosen ones in shared memory. The only atomics add integers: the
// result does not depend on their order.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/ops/topk.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kFewThreads = 128;   // for rows like a router's
constexpr int kManyThreads = 512;  // for rows of many thousands
constexpr std::int64_t kShortRow = 2048;
constexpr std::size_t kSharedWithoutAsking =
    40 * 1024;  // the limit is 48 KiB less the static arrays

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
  __shared__ int above_in_warp[2][kManyThreads / kWarp], ties_in_warp[2][kManyThreads / kWarp];
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

// Bitonic sort by falling key, then rising index; `size` is a power of two.
template <class Key>
__device__ void sort_best_first(Key* keys, std::int32_t* indices, int size) {
  for (int span = 2; span <= size; span *= 2) {
    for (int distance = span / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (int pair = threadIdx.x; pair < size / 2; pair += blockDim.x) {
        const int a = 2 * pair - (pair & (distance - 1)), b = a + distance;
        const bool b_first = keys[b] > keys[a] || (keys[b] == keys[a] && indices[b] < indices[a]);
        const bool falling = (a & span) == 0;
        if (b_first != falling) continue;
        const Key key = keys[a];
        keys[a] = keys[b];
        keys[b] = key;
        const std::int32_t index = indices[a];
        indices[a] = indices[b];
        indices[b] = index;
      }
    }
  }
  __syncthreads();
}

template <class T, bool Sorted>
__global__ void __launch_bounds__(kManyThreads) choose_kernel(std::int32_t* indices,
                                                              std::int32_t* counts,
                                                              const T* scores,
                                                              const std::int32_t* valid_count,
                                                              std::int64_t rows,
                                                              int n,
                                                              int k,
                                                              int sort_size) {
  using Key = key_t<T>;
  extern __shared__ __align__(8) unsigned char shared[];
  auto* keys = reinterpret_cast<Key*>(shared);
  auto* chosen = reinterpret_cast<std::int32_t*>(keys + sort_size);
  for (std::int64_t t = blockIdx.x; t < rows; t += gridDim.x) {
    const T* row = scores + t * n;
    std::int32_t* out = indices + t * k;
    const int n_t = valid_count == nullptr ? n : min(max(valid_count[t], 0), n);
    const int count = min(k, n_t);
    const Bar<Key> bar =
        count < n_t ? find_bar(row, n_t, count) : Bar<Key>{0, n_t};  // no score has key 0
    if constexpr (Sorted) {
      for (int j = threadIdx.x; j < sort_size; j += blockDim.x) {  // padding goes last
        keys[j] = 0;
        chosen[j] = 0x7fffffff;
      }
      __syncthreads();
      collect(row, n_t, count, bar, [&](int position, Key key, int index) {
        keys[position] = key;
        chosen[position] = index;
      });
      sort_best_first(keys, chosen, sort_size);
      for (int j = threadIdx.x; j < count; j += blockDim.x)
        out[j] = chosen[j];
    } else {
      collect(row, n_t, count, bar, [&](int position, Key, int index) { out[position] = index; });
    }
    for (int j = count + static_cast<int>(threadIdx.x); j < k; j += blockDim.x)
      out[j] = -1;
    if (threadIdx.x == 0 && counts != nullptr) counts[t] = count;
    __syncthreads();  // the next row writes the shared arrays again
  }
}

// One warp per row.
__global__ void __launch_bounds__(kFewThreads) replay_kernel(std::int32_t* indices,
                                                             std::int32_t* counts,
                                                             const std::int32_t* given,
                                                             std::int64_t rows,
                                                             std::int64_t k) {
  constexpr int kRows = kFewThreads / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (std::int64_t t = std::int64_t{blockIdx.x} * kRows + threadIdx.x / kWarp; t < rows;
       t += std::int64_t{gridDim.x} * kRows) {
    int count = 0;
    for (std::int64_t j = lane; j < k; j += kWarp) {
      const std::int32_t index = given[t * k + j];
      indices[t * k + j] = index;
      if (index >= 0) ++count;
    }
    count = warp_sum(count);
    if (lane == 0 && counts != nullptr) counts[t] = count;
  }
}

template <class T, bool Sorted>
void choose(CudaContext& context, const TopK& op) {
  const std::int64_t rows = op.indices.dim(0), k = op.indices.dim(1), n = op.scores.dim(1);
  int sort_size = 0;
  if constexpr (Sorted) {
    sort_size = 2;
    while (sort_size < std::min(k, std::max<std::int64_t>(n, 1)))
      sort_size *= 2;
  }
  const std::size_t shared_bytes =
      static_cast<std::size_t>(sort_size) * (sizeof(key_t<T>) + sizeof(std::int32_t));
  const auto stream = native_stream(context);
  if (shared_bytes > kSharedWithoutAsking) {
    MOESAIC_CUDA_CALL(cudaFuncSetAttribute(choose_kernel<T, Sorted>,
                                           cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(shared_bytes)));
  }
  const int threads = n <= kShortRow ? kFewThreads : kManyThreads;
  choose_kernel<T, Sorted><<<grid_for(context, rows, 16), threads, shared_bytes, stream>>>(
      op.indices.as<std::int32_t>(),
      op.counts.as<std::int32_t>(),
      op.scores.as<T>(),
      op.valid_count.as<std::int32_t>(),
      rows,
      static_cast<int>(n),
      static_cast<int>(k),
      sort_size);
  check_launch("kernel top_k");
}

template <class T>
void choose(CudaContext& context, const TopK& op) {
  if (op.order == TopK::Order::best_first) return choose<T, true>(context, op);
  choose<T, false>(context, op);
}

void replay(CudaContext& context, const TopK& op) {
  const std::int64_t rows = op.indices.dim(0), k = op.indices.dim(1);
  constexpr int kRows = kFewThreads / kWarp;
  replay_kernel<<<grid_for(context, (rows + kRows - 1) / kRows, 16),
                  kFewThreads,
                  0,
                  native_stream(context)>>>(op.indices.as<std::int32_t>(),
                                            op.counts.as<std::int32_t>(),
                                            op.given.as<std::int32_t>(),
                                            rows,
                                            k);
  check_launch("kernel top_k: replay");
}

}  // namespace

void launch(CudaContext& context, const TopK& op) {
  if (is_dry(context) || op.indices.numel() == 0) return;
  if (!op.given.empty()) return replay(context, op);
  if (op.scores.dtype() == DType::f64) return choose<double>(context, op);
  choose<float>(context, op);
}

}  // namespace moesaic
