// The small kernels around attention: blocks of query rows, selection bits, the largest logit, the
// row statistics of the backward, and the sum of the shared key's gradient over heads.
#include "kernels/cuda/attention_common.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kListThreads = 1024;
constexpr int kWordsAtOnce =
    4096;  // words of a row's bits that are made in shared memory at a time

// One block; every round takes kListThreads documents, an exclusive scan of their numbers of blocks
// says where each writes.
__global__ void __launch_bounds__(kListThreads) list_kernel(QueryBlock* list,
                                                            std::int32_t* total,
                                                            const std::int32_t* cu,
                                                            std::int64_t documents,
                                                            std::int64_t first,
                                                            int tile) {
  __shared__ int in_warp[kListThreads / kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp,
            warp = static_cast<int>(threadIdx.x) / kWarp;
  int before = 0;  // blocks of earlier rounds
  for (std::int64_t round = 0; round < documents; round += kListThreads) {
    const std::int64_t d = round + threadIdx.x;
    int begin = 0, end = 0, row = 0, rows = 0;
    if (d < documents) {
      begin = cu[d];
      end = cu[d + 1];
      row = static_cast<int>(begin > first ? begin - first : 0);
      rows = static_cast<int>(end > first ? end - first : 0) - row;
    }
    const int own = (rows + tile - 1) / tile;
    int upto = own;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int other = __shfl_up_sync(0xffffffffU, upto, offset);
      if (lane >= offset) upto += other;
    }
    if (lane == kWarp - 1) in_warp[warp] = upto;
    __syncthreads();
    int at = before + upto - own;
    for (int w = 0; w < kListThreads / kWarp; ++w) {
      if (w < warp) at += in_warp[w];
      before += in_warp[w];
    }
    __syncthreads();
    for (int i = 0; i < own; ++i)
      list[at + i] = {begin, end, row + i * tile, min(tile, rows - i * tile)};
  }
  if (threadIdx.x == 0) *total = before;
}

// One block per query row.
__global__ void __launch_bounds__(kThreads) bits_kernel(std::uint32_t* words,
                                                        std::int64_t per_row,
                                                        const std::int32_t* selected,
                                                        int k,
                                                        const std::int32_t* cu,
                                                        std::int64_t documents,
                                                        std::int64_t first) {
  __shared__ std::uint32_t part[kWordsAtOnce];
  const std::int64_t row = blockIdx.x, position = first + row;
  const std::int64_t d = document_of(cu, documents, position);
  const std::int64_t begin = cu[d];
  const int used = static_cast<int>((cu[d + 1] - begin + 127) / 128) * 4;
  for (int base = 0; base < used; base += kWordsAtOnce) {
    const int count = min(kWordsAtOnce, used - base);
    for (int i = threadIdx.x; i < count; i += kThreads)
      part[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < k; i += kThreads) {
      const std::int64_t key = selected[row * k + i];
      if (key < begin || key > position) continue;
      const auto s = static_cast<int>(key - begin);
      const int word = (s >> 5) - base;
      if (word >= 0 && word < count) atomicOr(&part[word], 1U << (s & 31));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kThreads)
      words[row * per_row + base + i] = part[i];
    __syncthreads();
  }
}

// One block per head.
template <class A>
__global__ void __launch_bounds__(kThreads) combine_max_kernel(
    A* max_logit, const A* parts, const std::int32_t* count, std::int64_t bound, bool accumulate) {
  __shared__ A in_warp[kThreads / kWarp];
  const std::int64_t h = blockIdx.x;
  A largest = -INFINITY;
  for (int i = threadIdx.x; i < *count; i += kThreads)
    largest = max(largest, parts[h * bound + i]);
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    largest = max(largest, __shfl_xor_sync(0xffffffffU, largest, offset));
  if (threadIdx.x % kWarp == 0) in_warp[threadIdx.x / kWarp] = largest;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (const A other : in_warp)
    largest = max(largest, other);
  max_logit[h] = accumulate ? max(max_logit[h], largest) : largest;
}

// One warp per (row, head), N channels per access.
template <class A, class T, int N>
__global__ void __launch_bounds__(kThreads) statistics_kernel(A* delta,
                                                              A* log_sum,
                                                              __nv_bfloat16* rounded,
                                                              const T* d_o,
                                                              const A* o,
                                                              const A* lse,
                                                              std::int64_t rows,
                                                              std::int64_t heads,
                                                              std::int64_t dv,
                                                              A log_sum_factor) {
  const std::int64_t i = std::int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (i >= rows * heads) return;
  const std::int64_t t = i / heads, h = i % heads;
  A sum = 0;
  for (std::int64_t c = threadIdx.x % kWarp * N; c < dv; c += kWarp * N) {
    const auto x = load<N>(d_o + i * dv + c);
    const auto y = load<N>(o + i * dv + c);
    Vec<__nv_bfloat16, N> r;
#pragma unroll
    for (int e = 0; e < N; ++e) {
      sum += widen<A>(x.v[e]) * y.v[e];
      r.v[e] = __float2bfloat16_rn(static_cast<float>(widen<A>(x.v[e])));
    }
    if (rounded != nullptr) store<N>(rounded + i * dv + c, r);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) {
    const A l = lse[h * rows + t];
    delta[h * rows + t] = sum;
    log_sum[h * rows + t] = l == -INFINITY ? INFINITY : l * log_sum_factor;
  }
}

template <class A, class T>
__global__ void __launch_bounds__(kThreads)
    sum_heads_kernel(T* dkr, const A* parts, std::int64_t per_head, std::int64_t heads) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= per_head) return;
  A sum = parts[i];
  for (std::int64_t h = 1; h < heads; ++h)
    sum += parts[h * per_head + i];
  dkr[i] = round_to<T>(sum);
}

unsigned blocks_of(std::int64_t n, std::int64_t per_block) {
  return static_cast<unsigned>((n + per_block - 1) / per_block);
}

}  // namespace

QueryBlocksMemory QueryBlocksMemory::take(Arena& scratch,
                                          const AttentionSizes& size,
                                          std::int64_t tile) {
  // A document adds at most one block that is not full.
  const std::int64_t bound = size.queries / tile + std::min(size.documents, size.queries) + 1;
  return {scratch.take({bound, 4}, DType::i32, "attention query blocks"),
          scratch.take({1}, DType::i32, "attention query blocks")};
}

void list_query_blocks(cudaStream_t stream,
                       const QueryBlocks& blocks,
                       const AttentionSizes& size,
                       ConstTensorView cu_seqlens,
                       std::int64_t tile) {
  list_kernel<<<1, kListThreads, 0, stream>>>(blocks.list,
                                              blocks.count,
                                              cu_seqlens.as<std::int32_t>(),
                                              size.documents,
                                              size.first(),
                                              static_cast<int>(tile));
  check_launch("kernel attention: query blocks");
}

TensorView take_selection_bits(Arena& scratch,
                               const AttentionSizes& size,
                               ConstTensorView selected) {
  if (selected.empty()) return {};
  return scratch.take(
      {size.queries, (size.keys + 127) / 128 * 4}, DType::i32, "attention selection bits");
}

SelectionBits fill_selection_bits(cudaStream_t stream,
                                  TensorView memory,
                                  const AttentionSizes& size,
                                  ConstTensorView cu_seqlens,
                                  ConstTensorView selected) {
  if (memory.empty() || size.queries == 0) return {};
  auto* words = reinterpret_cast<std::uint32_t*>(memory.data());
  bits_kernel<<<static_cast<unsigned>(size.queries), kThreads, 0, stream>>>(
      words,
      memory.dim(1),
      selected.as<std::int32_t>(),
      static_cast<int>(selected.dim(1)),
      cu_seqlens.as<std::int32_t>(),
      size.documents,
      size.first());
  check_launch("kernel attention: selection bits");
  return {words, memory.dim(1)};
}

template <class A>
void combine_max_logits(cudaStream_t stream,
                        A* max_logit,
                        const A* parts,
                        const QueryBlocks& blocks,
                        std::int64_t heads,
                        bool accumulate) {
  combine_max_kernel<A><<<static_cast<unsigned>(heads), kThreads, 0, stream>>>(
      max_logit, parts, blocks.count, blocks.bound, accumulate);
  check_launch("kernel attention: largest logits");
}
template void combine_max_logits(
    cudaStream_t, float*, const float*, const QueryBlocks&, std::int64_t, bool);
template void combine_max_logits(
    cudaStream_t, double*, const double*, const QueryBlocks&, std::int64_t, bool);

template <class A>
void backward_row_statistics(cudaStream_t stream,
                             A* delta,
                             A* log_sum,
                             __nv_bfloat16* rounded,
                             const AttentionBackward& op,
                             A log_sum_factor) {
  const std::int64_t rows = op.o.dim(0), heads = op.o.dim(1), dv = op.o.dim(2);
  dispatch_float(op.d_o.dtype(), [&]<class T>(TypeTag<T>) {
    if constexpr (std::is_same_v<acc_t<T>, A>) {
      const auto* d_o = reinterpret_cast<const device_t<T>*>(op.d_o.as<T>());
      const auto* o = op.o.as<A>();
      const bool vectors = dv % 4 == 0 && is_aligned(d_o, 16) && is_aligned(o, 16);
      const auto kernel =
          vectors ? statistics_kernel<A, device_t<T>, 4> : statistics_kernel<A, device_t<T>, 1>;
      kernel<<<blocks_of(rows * heads, kThreads / kWarp), kThreads, 0, stream>>>(
          delta, log_sum, rounded, d_o, o, op.lse.as<A>(), rows, heads, dv, log_sum_factor);
    }
  });
  check_launch("kernel attention_backward: row statistics");
}
template void backward_row_statistics(
    cudaStream_t, float*, float*, __nv_bfloat16*, const AttentionBackward&, float);
template void backward_row_statistics(
    cudaStream_t, double*, double*, __nv_bfloat16*, const AttentionBackward&, double);

template <class A>
void sum_shared_key_gradient(cudaStream_t stream,
                             TensorView dkr,
                             const A* parts,
                             const AttentionSizes& size) {
  const std::int64_t per_head = size.keys * size.dr;
  if (per_head == 0) return;
  dispatch_float(dkr.dtype(), [&]<class T>(TypeTag<T>) {
    if constexpr (std::is_same_v<acc_t<T>, A>) {
      sum_heads_kernel<A, device_t<T>><<<blocks_of(per_head, kThreads), kThreads, 0, stream>>>(
          reinterpret_cast<device_t<T>*>(dkr.as<T>()), parts, per_head, size.heads);
    }
  });
  check_launch("kernel attention_backward: gradient of the shared key");
}
template void sum_shared_key_gradient(cudaStream_t,
                                      TensorView,
                                      const float*,
                                      const AttentionSizes&);
template void sum_shared_key_gradient(cudaStream_t,
                                      TensorView,
                                      const double*,
                                      const AttentionSizes&);

}  // namespace moesaic::cuda
