// Top-k: one block per row. A radix selection (radix_select.cuh) chooses; best_first sorts the k
// chosen ones in shared memory.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/radix_select.cuh"
#include "kernels/ops/topk.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kFewThreads = 128;                 // for rows like a router's
constexpr int kManyThreads = kMaxSelectThreads;  // for rows of many thousands
constexpr std::int64_t kShortRow = 2048;
constexpr std::size_t kSharedWithoutAsking =
    40 * 1024;  // the limit is 48 KiB less the static arrays

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
