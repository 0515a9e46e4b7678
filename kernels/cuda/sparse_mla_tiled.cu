// The tensor-core kernels of sparse MLA, host side: when they apply, how queries and heads become blocks, and the lists of
// keys that blocks gather.
#include "kernels/cuda/sparse_mla_tiled.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kListThreads = 256;
constexpr int kListWarps = kListThreads / kWarp;

struct ListArgs {
  std::uint32_t* lists;
  std::int32_t* counts;
  std::int64_t per_list;
  QueryBlocks blocks;
  const std::int32_t* selected;
  int k;
  int first;  // position of query row 0
};

// Whether the ascending list of n holds s.
__device__ __forceinline__ bool holds(const std::int32_t* list, int n, std::int32_t s) {
  int low = 0, high = n;
  while (low < high) {
    const int middle = (low + high) / 2;
    (list[middle] < s ? low : high) = middle + (list[middle] < s ? 1 : 0);
  }
  return low < n && list[low] == s;
}

// One block per block of queries: first all keys of its first query, then those of the second that are new, and so on.
// A query's results do not depend on what comes after its own part, since it gets no probability.
__global__ void __launch_bounds__(kListThreads) list_kernel(ListArgs a) {
  extern __shared__ std::int32_t rows[];  // [queries, k]
  __shared__ int lengths[kMostQueries], in_warp[kListWarps];
  const int index = static_cast<int>(blockIdx.x);
  if (index >= *a.blocks.count) return;
  const QueryBlock block = a.blocks.list[index];
  const int lane = static_cast<int>(threadIdx.x) % kWarp,
            warp = static_cast<int>(threadIdx.x) / kWarp;
  for (int i = threadIdx.x; i < block.count * a.k; i += kListThreads)
    rows[i] = a.selected[std::int64_t{block.row} * a.k + i];
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < block.count) {  // -1 follows the last key
    const std::int32_t* row = rows + threadIdx.x * a.k;
    int low = 0, high = a.k;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (row[middle] >= 0) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    lengths[threadIdx.x] = low;
  }
  __syncthreads();
  std::uint32_t* const list = a.lists + index * a.per_list;
  int written = 0;
  for (int q = 0; q < block.count; ++q) {
    for (int base = 0; base < lengths[q]; base += kListThreads) {
      const int i = base + static_cast<int>(threadIdx.x);
      std::uint32_t entry = 0;
      if (i < lengths[q]) {
        const std::int32_t s = rows[q * a.k + i];
        const int position = a.first + block.row;  // of query 0
        bool fresh = s >= block.begin && s <= position + q;
        for (int other = 0; fresh && other < block.count; ++other) {
          const bool has =
              other == q || (s <= position + other && holds(rows + other * a.k, lengths[other], s));
          if (has && other < q) fresh = false;
          if (has) entry |= 1U << (kKeyBits + other);
        }
        entry = fresh ? entry | static_cast<std::uint32_t>(s) : 0;
      }
      const unsigned mask = __ballot_sync(0xffffffffU, entry != 0);
      if (lane == 0) in_warp[warp] = __popc(mask);
      __syncthreads();
      int at = written + __popc(mask & ((1U << lane) - 1U));
      for (int w = 0; w < kListWarps; ++w) {
        if (w < warp) at += in_warp[w];
        written += in_warp[w];
      }
      if (entry != 0) list[at] = entry;
      __syncthreads();
    }
  }
  const int end = (written + kGatherKeys - 1) / kGatherKeys * kGatherKeys;
  for (int i = written + static_cast<int>(threadIdx.x); i < end; i += kListThreads)
    list[i] = 0;
  if (threadIdx.x == 0) a.counts[index] = written;
}

// 64 rows hold as many queries as fit; a query of more than 64 heads is cut into equal parts.
void arrange(GatherProblem& p, std::int64_t heads) {
  p.heads = static_cast<int>(heads);
  p.head_parts = (p.heads + kGatherRows - 1) / kGatherRows;
  p.rows_per_query = (p.heads + p.head_parts - 1) / p.head_parts;
  p.queries_per_block = p.head_parts > 1 ? 1 : std::min(kMostQueries, kGatherRows / p.heads);
}

struct TiledScratch {
  AttentionSizes size;  // only what lists of query blocks need
  GatherProblem problem;
  std::int64_t k;
  QueryBlocksMemory blocks;
  TensorView lists, counts;
  template <class Op>
  TiledScratch(Arena& scratch, const Op& op) : k(op.selected.dim(1)) {
    size.queries = op.q.dim(0);
    size.keys = op.kv.dim(0);
    size.documents = op.cu_seqlens.dim(0) - 1;
    arrange(problem, op.q.dim(1));
    problem.queries = static_cast<int>(size.queries);
    problem.keys = static_cast<int>(size.keys);
    problem.scale = static_cast<float>(op.scale);
    blocks = QueryBlocksMemory::take(scratch, size, problem.queries_per_block);
    const std::int64_t bound = blocks.list.dim(0),
                       most = (problem.queries_per_block * k + kGatherKeys - 1) / kGatherKeys *
                              kGatherKeys;
    lists = scratch.take({bound, most}, DType::i32, "sparse mla lists of keys");
    counts = scratch.take({bound}, DType::i32, "sparse mla lists of keys");
  }
  template <class Op>
  GatherProblem fill(cudaStream_t stream, const Op& op) const {
    GatherProblem p = problem;
    p.blocks = blocks.blocks();
    p.lists = reinterpret_cast<const std::uint32_t*>(lists.data());
    p.counts = counts.as<std::int32_t>();
    p.per_list = lists.dim(1);
    list_query_blocks(stream, p.blocks, size, op.cu_seqlens, p.queries_per_block);
    const std::size_t bytes = static_cast<std::size_t>(p.queries_per_block * k) * 4;
    allow_shared_memory(list_kernel, bytes);
    list_kernel<<<static_cast<unsigned>(p.blocks.bound), kListThreads, bytes, stream>>>(
        {reinterpret_cast<std::uint32_t*>(lists.data()),
         counts.as<std::int32_t>(),
         p.per_list,
         p.blocks,
         op.selected.template as<std::int32_t>(),
         static_cast<int>(k),
         static_cast<int>(size.first())});
    check_launch("kernel sparse_mla: lists of keys");
    return p;
  }
};

template <class Op>
bool inputs_are_tiled(const CudaContext& context, const Op& op) {
  constexpr std::int64_t kMost = std::int64_t{1} << kKeyBits;
  const SparseMlaSizes size = sparse_mla_sizes(op);
  return may_specialise(context) && op.q.dtype() == DType::bf16 && size.dc == kLatent &&
         size.width == kGatherWidth && size.queries > 0 && size.heads > 0 && op.scale > 0 &&
         size.k <= kLongestSelection && size.keys < kMost &&
         size.queries * size.heads < (std::int64_t{1} << 31) &&
         can_map(op.q.data(), kGatherWidth, DType::bf16) && is_aligned(op.kv.data(), 16) &&
         is_aligned(op.o.data(), 16);
}

}  // namespace

bool sparse_mla_is_tiled(const CudaContext& context, const SparseMlaForward& op) {
  return inputs_are_tiled(context, op);
}

void sparse_mla_tiled(CudaContext& context, const SparseMlaForward& op) {
  const Arena::Mark mark(context.scratch);
  const TiledScratch scratch(context.scratch, op);
  const TensorView maxima =
      context.scratch.take({op.q.dim(1), op.q.dim(0)}, DType::f32, "sparse mla maxima");
  if (is_dry(context)) return;
  const auto stream = native_stream(context);
  const GatherProblem problem = scratch.fill(stream, op);
  gather_forward(
      stream,
      problem,
      op,
      {reinterpret_cast<__nv_bfloat16*>(op.o.data()), op.lse.as<float>(), maxima.as<float>()});
  combine_row_maxima(stream, op.max_logit, maxima, op.accumulate_max);
}

bool sparse_mla_is_tiled(const CudaContext& context, const SparseMlaBackward& op) {
  return inputs_are_tiled(context, op) && can_map(op.d_o.data(), kLatent, DType::bf16) &&
         is_aligned(op.dq.data(), 16);
}

void sparse_mla_tiled(CudaContext& context, const SparseMlaBackward& op) {
  const Arena::Mark mark(context.scratch);
  const TiledScratch scratch(context.scratch, op);
  const KeySumsMemory memory = KeySumsMemory::take(context.scratch, op);
  if (is_dry(context)) return;
  const auto stream = native_stream(context);
  prepare_key_sums(stream, memory, op, kLog2OfE);
  gather_backward(stream, scratch.fill(stream, op), op, memory);
  finish_key_sums(stream, memory, op);
}

}  // namespace moesaic::cuda
