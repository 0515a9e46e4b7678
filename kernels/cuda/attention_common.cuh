#pragma once
// What the attention kernels share: sizes, blocks of query rows that never straddle a document, the
// visible pairs of a selection as bits, and the row statistics of the backward.
#include <cstdint>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/ops/attention.h"

namespace moesaic::cuda {

struct AttentionSizes {
  std::int64_t queries = 0, keys = 0, heads = 0, dn = 0, dr = 0, dv = 0, documents = 0;
  __host__ __device__ std::int64_t dqk() const { return dn + dr; }
  __host__ __device__ std::int64_t dkv() const { return dn + dv; }
  /// Position of query row 0.
  __host__ __device__ std::int64_t first() const { return keys - queries; }
};
template <class Op>
AttentionSizes attention_sizes(const Op& op) {
  AttentionSizes s;
  s.queries = op.q.dim(0);
  s.keys = op.kvb.dim(0);
  s.heads = op.q.dim(1);
  s.dv = op.o.dim(2);
  s.dn = op.kvb.dim(2) - s.dv;
  s.dr = op.q.dim(2) - s.dn;
  s.documents = op.cu_seqlens.dim(0) - 1;
  return s;
}

/// Up to a tile of query rows of one document. Blocks of a document that has all its queries begin at
/// multiples of the tile, so a row's sums do not depend on what surrounds its document.
struct QueryBlock {
  std::int32_t begin;  ///< keys [begin, end) of the document
  std::int32_t end;
  std::int32_t row;    ///< first query row
  std::int32_t count;  ///< query rows
};
/// Device memory: the blocks in order, and how many there are.
struct QueryBlocks {
  QueryBlock* list = nullptr;
  std::int32_t* count = nullptr;
  std::int64_t bound = 0;  ///< no more than so many
};
struct QueryBlocksMemory {
  TensorView list, count;
  static QueryBlocksMemory take(Arena& scratch, const AttentionSizes& size, std::int64_t tile);
  QueryBlocks blocks() const {
    return {reinterpret_cast<QueryBlock*>(list.data()), count.as<std::int32_t>(), list.dim(0)};
  }
};
/// Fills the blocks, documents in order, rows in order.
void list_query_blocks(cudaStream_t stream,
                       const QueryBlocks& blocks,
                       const AttentionSizes& size,
                       ConstTensorView cu_seqlens,
                       std::int64_t tile);

/// Which keys of its document a query row has selected and sees: bit s of row t is key begin + s.
/// words null = no selection: all of them up to the row's own position.
struct SelectionBits {
  const std::uint32_t* words = nullptr;
  std::int64_t per_row = 0;  ///< words per row, a multiple of 4

  /// Whether query row `row`, at `position` in its document, sees its key `s`.
  __device__ bool visible(std::int64_t row, int position, int s) const {
    if (words == nullptr) return s <= position;
    return ((words[row * per_row + (s >> 5)] >> (s & 31)) & 1U) != 0;
  }
};
/// Scratch for the bits; empty without a selection.
TensorView take_selection_bits(Arena& scratch,
                               const AttentionSizes& size,
                               ConstTensorView selected);
/// Fills them. Words past the document's end, up to a multiple of 128 keys, are zero.
SelectionBits fill_selection_bits(cudaStream_t stream,
                                  TensorView memory,
                                  const AttentionSizes& size,
                                  ConstTensorView cu_seqlens,
                                  ConstTensorView selected);

/// max_logit[h] = max over parts[h, 0..*blocks.count), combined with what it holds when `accumulate`.
template <class A>
void combine_max_logits(cudaStream_t stream,
                        A* max_logit,
                        const A* parts,
                        const QueryBlocks& blocks,
                        std::int64_t heads,
                        bool accumulate);

/// Per (head, row): delta = <d_o, o>, and the log-sum-exp times `log_sum_factor`, +inf in place of
/// -inf so that a row without keys has probabilities of 0. Both [H, T]. `rounded`, when not null,
/// receives d_o as bf16.
template <class A>
void backward_row_statistics(cudaStream_t stream,
                             A* delta,
                             A* log_sum,
                             __nv_bfloat16* rounded,
                             const AttentionBackward& op,
                             A log_sum_factor);

/// dkr = sum over heads of parts [H, T, dr], heads in order.
template <class A>
void sum_shared_key_gradient(cudaStream_t stream,
                             TensorView dkr,
                             const A* parts,
                             const AttentionSizes& size);

/// The document that holds `position`: the last n with cu[n] <= position.
__device__ __forceinline__ std::int64_t document_of(const std::int32_t* cu,
                                                    std::int64_t documents,
                                                    std::int64_t position) {
  std::int64_t low = 0, high = documents;  // cu[low] <= position < cu[high]
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (cu[middle] <= position ? low : high) = middle;
  }
  return low;
}

/// Allows a kernel `bytes` of dynamic shared memory.
template <class Kernel>
void allow_shared_memory(Kernel* kernel, std::size_t bytes) {
  check_call(static_cast<int>(cudaFuncSetAttribute(
                 kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes))),
             "cudaFuncSetAttribute");
}

/// The plain kernels: any sizes and dtypes. Scratch is taken before a dry run returns.
void attention_plain(CudaContext& context, const AttentionForward& op);
void attention_plain(CudaContext& context, const AttentionBackward& op);

}  // namespace moesaic::cuda
