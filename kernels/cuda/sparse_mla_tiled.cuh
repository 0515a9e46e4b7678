#pragma once
// Sparse MLA on tensor cores: bf16, latents of 512 channels and 64 rotated ones.
//
// A block of threads owns 64 rows of queries: the heads of one query, of a part of its heads when there are more than 64,
// or of up to four neighbouring queries when there are few. It gathers the rows of kv that any of its queries has selected,
// 64 at a time, each row once for all heads and queries; what a query has not selected itself gets no probability.
// Neighbours select much the same keys, and where they do not, the rows of the tile would be empty otherwise.
//
// Tiles lie in shared memory as "column blocks" of 64 channels: rows of 128 bytes with the 128-byte swizzle. A gathered
// tile is the right operand of the logits, keys by channels, and transposed that of the values and of dq.
#include "kernels/cuda/attention_common.cuh"
#include "kernels/cuda/sparse_mla.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/wgmma.cuh"

namespace moesaic::cuda {

constexpr int kLatent = 512, kRotated = 64, kGatherWidth = kLatent + kRotated;
constexpr int kGatherRows = 64;     // query rows of a block
constexpr int kGatherKeys = 64;     // keys of a tile
constexpr int kGatherColumns = 64;  // channels of a column block
constexpr int kGatherRowBytes = 2 * kGatherColumns;
constexpr int kColumnBlock = 64 * kGatherRowBytes;
constexpr int kWidthBlocks = kGatherWidth / kGatherColumns,
              kLatentBlocks = kLatent / kGatherColumns;
constexpr int kWidthBytes = kWidthBlocks * kColumnBlock,
              kLatentBytes = kLatentBlocks * kColumnBlock;
constexpr int kMostQueries = 4;  // of a block
constexpr int kKeyBits = 28;     // of a list's entry; above them a bit per query
constexpr std::int64_t kLongestSelection = 8192;
constexpr float kLog2OfE = 1.4426950408889634F;

struct GatherProblem {
  int queries = 0, keys = 0, heads = 0;
  int rows_per_query = 0;  ///< heads of a query in one block
  int head_parts = 0;      ///< blocks that share a query
  int queries_per_block = 0;
  QueryBlocks blocks;
  const std::uint32_t* lists =
      nullptr;  ///< [blocks.bound, per_list]: keys of each block's queries, whose bits are set
  const std::int32_t* counts =
      nullptr;  ///< [blocks.bound]; up to a multiple of 64 the entries behind are 0
  std::int64_t per_list = 0;
  float scale = 1;
};

/// What a block of threads works on.
struct GatherBlock {
  QueryBlock queries;
  const std::uint32_t* list;
  int tiles;
  int head;  ///< first
  __device__ GatherBlock(const GatherProblem& p, int index, int part)
      : queries(p.blocks.list[index]),
        list(p.lists + index * p.per_list),
        tiles((p.counts[index] + kGatherKeys - 1) / kGatherKeys),
        head(part * p.rows_per_query) {}
  /// The row of q seen as [T H, width] of row 0.
  __device__ int first_row(const GatherProblem& p) const { return queries.row * p.heads + head; }
};
/// Row r of a block: which query and head, if any.
struct GatherRow {
  int query, head;
  bool exists;
  __device__ GatherRow(const GatherProblem& p, const GatherBlock& b, int r)
      : query(r / p.rows_per_query), head(b.head + r % p.rows_per_query) {
    exists = query < b.queries.count && head < p.heads;
  }
  /// The bit of entries that this row's query has selected.
  __device__ std::uint32_t bit() const { return exists ? 1U << (kKeyBits + query) : 0U; }
};
__device__ __forceinline__ std::int64_t key_of(std::uint32_t entry) {
  return entry & ((1U << kKeyBits) - 1U);
}

/// Threads [0, Threads) copy the rows of a tile: eight neighbours take 128 bytes. Rows behind the list's end become zero.
template <int Threads>
__device__ __forceinline__ void gather_tile(unsigned char* tile,
                                            const __nv_bfloat16* kv,
                                            const std::uint32_t* entries,
                                            int thread) {
  constexpr int kPieces = kGatherRowBytes / 16, kRowsAtOnce = Threads / kPieces;
  const int piece = thread % kPieces;
#pragma unroll
  for (int r0 = 0; r0 < kGatherKeys; r0 += kRowsAtOnce) {
    const int r = r0 + thread / kPieces;
    if (kGatherKeys % kRowsAtOnce != 0 && r >= kGatherKeys) break;
    const std::uint32_t entry = entries[r];
    const __nv_bfloat16* from = kv + key_of(entry) * kGatherWidth + piece * 8;
    unsigned char* to = tile + r * kGatherRowBytes + (piece ^ (r % 8)) * 16;
#pragma unroll
    for (int c = 0; c < kWidthBlocks; ++c)
      cp_async_16(to + c * kColumnBlock, from + c * kGatherColumns, entry != 0);
  }
}

/// Rows [row, row + 64) of a matrix of `blocks` column blocks, by one thread.
__device__ __forceinline__ void load_query_rows(
    unsigned char* to, const CUtensorMap* map, std::uint64_t* barrier, int blocks, int row) {
  for (int c = 0; c < blocks; ++c)
    tma_load_2d(to + c * kColumnBlock, map, barrier, c * kGatherColumns, row);
}

/// d = a b^T over Blocks column blocks: a 64 rows, b the N rows from `b` on of 64. Not committed.
template <int Blocks, int N>
__device__ __forceinline__ void gather_logits(float (&d)[N / 2], std::uint64_t a, std::uint64_t b) {
#pragma unroll
  for (int c = 0; c < Blocks; ++c)
#pragma unroll
    for (int k = 0; k < kGatherColumns / 16; ++k) {
      const auto at = descriptor_step(c * kColumnBlock + k * 32);
      wgmma_ss<Major::k, Major::k>(d, a + at, b + at, c + k > 0);
    }
}

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Dynamic shared memory from its first multiple of 1024 bytes.
__device__ __forceinline__ unsigned char* gather_memory() {
  extern __shared__ unsigned char memory[];
  return memory + (1024 - shared_address(memory) % 1024) % 1024;
}
constexpr int kGatherSlack = 1024;

struct GatherOutputs {
  __nv_bfloat16* o;
  float *lse, *maxima;  ///< [H, Tq] both
};
void gather_forward(cudaStream_t stream,
                    const GatherProblem& problem,
                    const SparseMlaForward& op,
                    const GatherOutputs& outputs);
void gather_backward(cudaStream_t stream,
                     const GatherProblem& problem,
                     const SparseMlaBackward& op,
                     const KeySumsMemory& memory);

/// Whether the tensor-core kernels take these sizes, types and addresses.
bool sparse_mla_is_tiled(const CudaContext& context, const SparseMlaForward& op);
bool sparse_mla_is_tiled(const CudaContext& context, const SparseMlaBackward& op);
void sparse_mla_tiled(CudaContext& context, const SparseMlaForward& op);
void sparse_mla_tiled(CudaContext& context, const SparseMlaBackward& op);

}  // namespace moesaic::cuda
