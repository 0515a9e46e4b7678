#pragma once
// Pieces of the tensor-core attention kernels for bf16 with dn = dv = 128 and dr = 0 or 64: tiles in
// shared memory, the walk over tiles, and the softmax's exponential.
//
// A tile of 128-byte rows (64 channels, 128-byte swizzle) is a "column block"; an operand of 192
// channels is three of them, one after the other. The key [kn ; kr] comes from two tensors that way.
// A block of threads is one producer warpgroup, whose first warp drives the copy engine, and two
// consumer warpgroups with 64 rows each.
#include "kernels/cuda/attention_common.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/wgmma.cuh"

namespace moesaic::cuda {

constexpr int kBlockRows = 128;  // query rows (keys, for dk and dv) of a block of threads
constexpr int kGroupRows = 64;   // of a consumer warpgroup
constexpr int kHalfTile = 64;    // granularity of the tiles' flags
constexpr int kTiledThreads = 384;
constexpr int kConsumerThreads = 256;
constexpr int kConsumerWarps = kConsumerThreads / kWarp;
constexpr int kHeadWidth = 128;  // dn and dv
constexpr int kChannelBlock = 64;
constexpr int kRowBytes = kChannelBlock * 2;
constexpr std::int64_t kTiledLongest = 1 << 18;  // keys, with a selection: bounds the list of tiles
constexpr int kConsumerRegisters = 240;
constexpr int kProducerRegisters = 24;
constexpr int kZeroBarrier = 1;  // named barriers of the consumers
constexpr int kReduceBarrier = 2;
constexpr int kTurnBarrier = 3;  // and 4, one per warpgroup
constexpr float kLog2E = 1.4426950408889634F;

constexpr int tile_bytes(int rows, int channels) {
  return rows * channels * 2;
}

/// Which tiles of 64 query rows x 64 keys hold a visible pair: row 2 b + i for half i of query block
/// b, column = key tile of its document. Null without a selection.
struct TileFlags {
  const std::uint8_t* flags = nullptr;
  std::int64_t per_row = 0;
};
/// What the kernels get besides tensor maps. Numbers of rows fit 31 bits, offsets of elements do not.
struct TiledProblem {
  int queries = 0, keys = 0, heads = 0;
  QueryBlocks blocks;
  QueryBlocks key_blocks;  ///< backward: of keys; the same ones where there are as many queries
  SelectionBits bits;
  TileFlags flags;
  float scale = 1;
  /// Position of query row 0.
  __device__ int first() const { return keys - queries; }
};

/// The tiles that a block walks: all from `offset` on, or those in a list. Any thread may ask.
struct TileList {
  const std::uint16_t* list = nullptr;
  int count = 0;
  int offset = 0;
  __device__ int operator[](int i) const { return offset + (list != nullptr ? list[i] : i); }
};
/// The first warp lists the i in [0, end) with keep(i), ascending; end < 65536. Everybody must
/// synchronise before reading.
template <class Keep>
__device__ __forceinline__ void list_tiles(std::uint16_t* list, int* count, int end, Keep&& keep) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int found = 0;
  for (int base = 0; base < end; base += kWarp) {
    const bool kept = base + lane < end && keep(base + lane);
    const unsigned mask = __ballot_sync(0xffffffffU, kept);
    if (kept)
      list[found + __popc(mask & ((1U << lane) - 1U))] = static_cast<std::uint16_t>(base + lane);
    found += __popc(mask);
  }
  if (lane == 0) *count = found;
}

/// A ring of stages: which one is used next, and the parity of its barriers.
template <int Stages>
struct Ring {
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == Stages) stage = 0, parity ^= 1U;
  }
};

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffU, x, 1);
  return x + __shfl_xor_sync(0xffffffffU, x, 2);
}

/// d = a b^T over Channels channels; a: 64 rows in column blocks of A_rows rows, b: N rows in column
/// blocks of N rows. Not committed.
template <int Channels, int ARows, int N>
__device__ __forceinline__ void product_nt(float (&d)[N / 2], std::uint64_t a, std::uint64_t b) {
#pragma unroll
  for (int c = 0; c < Channels / kChannelBlock; ++c) {
#pragma unroll
    for (int k = 0; k < kChannelBlock / 16; ++k)
      wgmma_ss<Major::k, Major::k>(d,
                                   a + descriptor_step(c * ARows * kRowBytes + k * 32),
                                   b + descriptor_step(c * N * kRowBytes + k * 32),
                                   c + k > 0);
  }
}
/// d += a b; a in registers as Depth / 16 fragments, b: Depth rows of Width channels (transposed
/// descriptor). Not committed.
template <int Depth, int Width>
__device__ __forceinline__ void product_rn(float (&d)[Width / 2],
                                           const std::uint32_t (&a)[Depth / 16][4],
                                           std::uint64_t b) {
#pragma unroll
  for (int k = 0; k < Depth / 16; ++k)
    wgmma_rs<Major::mn>(d, a[k], b + descriptor_step(k * 16 * kRowBytes), true);
}
/// Accumulators of N columns, rounded to bf16, as the fragments of an operand with k = N.
template <int N>
__device__ __forceinline__ void to_fragments(std::uint32_t (&a)[N / 16][4],
                                             const float (&d)[N / 2]) {
#pragma unroll
  for (int k = 0; k < N / 16; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[k][i] = pack_bf16(d[8 * k + 2 * i], d[8 * k + 2 * i + 1]);
}

/// Consumers: zero in rows [from, rows) of `blocks` column blocks of `rows` rows. What lies past a
/// document's end is another document's: it must not meet a zero probability, since 0 x NaN is NaN.
/// Both consumer warpgroups must call it, and not yet have read the tile.
__device__ __forceinline__ void clear_rows(unsigned char* tile, int blocks, int rows, int from) {
  const int thread = static_cast<int>(threadIdx.x) - (kTiledThreads - kConsumerThreads);
  const int per_block = (rows - from) * (kRowBytes / 16);
  for (int i = thread; i < blocks * per_block; i += kConsumerThreads) {
    const int offset = (i / per_block) * rows * kRowBytes + from * kRowBytes + i % per_block * 16;
    *reinterpret_cast<uint4*>(tile + offset) = uint4{0, 0, 0, 0};
  }
}
__device__ __forceinline__ void publish_cleared_rows() {
  fence_proxy_async();
  named_barrier_sync(kZeroBarrier, kConsumerThreads);
}

/// Dynamic shared memory from its first multiple of 1024 bytes.
__device__ __forceinline__ unsigned char* aligned_shared() {
  extern __shared__ unsigned char memory[];
  return memory + (1024 - shared_address(memory) % 1024) % 1024;
}
constexpr std::size_t kSharedSlack = 1024;

/// Boxes of 64 channels; the rows of a box are a kernel's tile.
struct TiledMaps {
  CUtensorMap q, kvb, kr, d_o;
};
struct TiledForwardOutputs {
  float *o, *lse, *maxima;  // maxima [H, blocks.bound] or null
};
void tiled_forward(cudaStream_t stream,
                   const TiledProblem& problem,
                   const AttentionForward& op,
                   const TiledForwardOutputs& outputs);
struct TiledBackward {
  const float *delta, *log_sum;  // [H, T]; log_sum in base 2
  ConstTensorView d_o;           // [T, H, 128] bf16
  float* dkr;                    // [H, T, dr]
};
void tiled_dq(cudaStream_t stream,
              const TiledProblem& problem,
              const AttentionBackward& op,
              const TiledBackward& data);
void tiled_dkv(cudaStream_t stream,
               const TiledProblem& problem,
               const AttentionBackward& op,
               const TiledBackward& data);

/// Whether the tensor-core kernels take these sizes, types and addresses.
bool attention_is_tiled(const CudaContext& context, const AttentionForward& op);
bool attention_is_tiled(const CudaContext& context, const AttentionBackward& op);
void attention_tiled(CudaContext& context, const AttentionForward& op);
void attention_tiled(CudaContext& context, const AttentionBackward& op);

/// Maps of [rows, heads, width] and of [rows, width] in boxes of 64 channels by `box_rows` rows.
CUtensorMap head_map(const ConstTensorView& tensor, int box_rows);

}  // namespace moesaic::cuda
