// Weight gradient of the grouped products on tensor cores: dw tiles of 128 (n) x 256 (k), sums over the rows of an expert,
// both operands transposed (rows of tokens are the sum's index). A pair of blocks takes neighbouring n and the same k; each
// loads half of the k side for both.
//
// The last stage of an expert's rows may hold rows of the next expert, or memory that nobody wrote: they are overwritten with
// zeros in shared memory before they are multiplied. An expert's rows are one sum, never split, in blocks from its first row
// on, so that its bits do not depend on which other experts the call has.
#include "kernels/cuda/grouped_gemm_tiled.h"
#include "kernels/cuda/grouped_ring.cuh"
#include "kernels/cuda/tensor_map.h"

namespace moesaic::cuda {
namespace {

constexpr int kTileN = 256;  // columns of dw (the N side of wgmma)
constexpr int kTilesN = kTileN / 64;
constexpr int kBytesN = kTileN * kRowBytes;
constexpr int kOutColumns = 32;  // f32 columns that a staging buffer holds for 64 rows
constexpr int kOutBytes = 64 * kOutColumns * 4;
constexpr int kBothGroups = 3;  // named barriers: 1, 2 for a warpgroup, 3 for both

struct WeightMaps {
  CUtensorMap dy, x, dw;
};

template <class C>
struct WeightArgs {
  C* dw;
  std::int64_t n, k;
  std::int32_t across, down;  // tiles of dw: columns, pairs of rows
  RingShape shape;
  const GroupTile* tiles;  // one per expert that has rows
  const std::int32_t* num_tiles;
};

struct Unit {
  GroupTile tile;
  std::int32_t row, column;  // of the block's tile in dw
};

template <class C>
__device__ __forceinline__ Unit unit_at(const WeightArgs<C>& args, int unit, int rank) {
  const int per_expert = args.across * args.down, local = unit % per_expert;
  return {args.tiles[unit / per_expert],
          (local / args.across * kCluster + rank) * kTileM,
          local % args.across * kTileN};
}
__device__ __forceinline__ int blocks_of(const GroupTile& tile) {
  return (tile.rows + kBlockK - 1) / kBlockK;
}

// One thread.
template <class C>
__device__ void produce(
    const WeightMaps& maps, const WeightArgs<C>& args, const Ring& ring, int num_units, int rank) {
  RingPosition at;
  for (int u = cluster_index(); u < num_units; u += num_clusters()) {
    const Unit unit = unit_at(args, u, rank);
    const int blocks = blocks_of(unit.tile);
    for (int b = 0; b < blocks; ++b, at.advance(ring)) {
      std::uint64_t* const full = ring.full + at.stage;
      unsigned char* const stage = ring.stage(at.stage);
      mbarrier_wait(ring.empty + at.stage, at.phase ^ 1U);
      mbarrier_arrive_expect(full, kBytesM + kBytesN);
      const int row = unit.tile.row + b * kBlockK;
      for (int i = 0; i < kConsumers; ++i)
        tma_load_2d(stage + i * kAtomTile, &maps.dy, full, unit.row + i * 64, row);
      for (int i = rank * kTilesN / kCluster; i < (rank + 1) * kTilesN / kCluster; ++i) {
        tma_load_2d_multicast(
            stage + kBytesM + i * kAtomTile, &maps.x, full, unit.column + i * 64, row, kBothBlocks);
      }
    }
  }
}

// Zeros in the rows of a stage from `rows` on. All consumers; a warpgroup clears its own M tile, and both share the N tiles.
__device__ __forceinline__ void clear_rows(unsigned char* stage, int rows, int group) {
  constexpr int kPieces = kRowBytes / 16, kTiles = 1 + kTilesN / kConsumers;
  // The swizzle moves pieces inside a row only.
  for (int piece = rows * kPieces + static_cast<int>(threadIdx.x) % kGroupThreads;
       piece < kBlockK * kPieces;
       piece += kGroupThreads) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      unsigned char* const tile =
          stage + (i == 0 ? group * kAtomTile
                          : kBytesM + (group * kTilesN / kConsumers + i - 1) * kAtomTile);
      *reinterpret_cast<uint4*>(tile + piece * 16) = uint4{};
    }
  }
  fence_proxy_async();
  named_barrier_sync(kBothGroups, kConsumers * kGroupThreads);
}

// dw += d through the copy engine, which adds in the L2 cache: no load to wait for. Each element has one adder, so the order
// of additions is fixed; what is subnormal becomes zero. One thread per warpgroup feeds the engine from two staging buffers.
__device__ __forceinline__ void add_by_copy_engine(const float (&d)[kTileN / 2],
                                                   const WeightMaps& maps,
                                                   const WeightArgs<float>& args,
                                                   const Unit& unit,
                                                   int group,
                                                   unsigned char* staging) {
  const int lane = static_cast<int>(threadIdx.x) % 32,
            warp = static_cast<int>(threadIdx.x) % kGroupThreads / 32;
  const bool issues = threadIdx.x % kGroupThreads == 0;
  const int row = unit.row + group * 64;
  const auto offset = static_cast<std::uint32_t>((warp * 16 + lane / 4) * kRowBytes + lane % 4 * 8);
#pragma unroll
  for (int c = 0; c < kTileN / kOutColumns; ++c) {
    unsigned char* const chunk = staging + c % 2 * kOutBytes;
    if (issues) bulk_wait_read<1>();
    named_barrier_sync(1 + group, kGroupThreads);
#pragma unroll
    for (int j = 0; j < kOutColumns / 8; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = (c * kOutColumns / 8 + j) * 4 + h * 2;
        *reinterpret_cast<float2*>(
            chunk + swizzled_128(offset + static_cast<std::uint32_t>(j * 32 + h * 8 * kRowBytes))) =
            make_float2(d[i], d[i + 1]);
      }
    }
    fence_proxy_async();
    named_barrier_sync(1 + group, kGroupThreads);
    const int column = unit.column + c * kOutColumns;
    if (issues) {
      if (row < args.n && column < args.k)
        tma_reduce_add_3d(&maps.dw, chunk, column, row, unit.tile.slot);
      bulk_commit();  // also when nothing was issued: the wait above counts groups
    }
  }
}

// dw += d, rounded once. Neighbouring lanes swap halves, so that a lane has four columns of a row, and four lanes 16.
template <class C>
__device__ __forceinline__ void add_from_registers(const float (&d)[kTileN / 2],
                                                   const WeightArgs<C>& args,
                                                   const Unit& unit,
                                                   int group) {
  const int lane = static_cast<int>(threadIdx.x) % 32,
            warp = static_cast<int>(threadIdx.x) % kGroupThreads / 32;
  const bool odd = lane % 2 != 0;
  const std::int64_t row = unit.row + group * 64 + warp * 16 + lane / 4;
  const std::int64_t column = unit.column + lane % 2 * 8 + lane % 4 / 2 * 4;
  C* const dw = args.dw + (unit.tile.slot * args.n + row) * args.k + column;
  constexpr int kColumns = 16;  // of four lanes
  constexpr int kBatch = 4;     // of them, whose old values are on their way at a time
  const auto inside = [&](int i, int h) {
    return row + h * 8 < args.n && column + i * kColumns < args.k;
  };
#pragma unroll
  for (int b = 0; b < kTileN / kColumns; b += kBatch) {
    Vec<C, 4> v[kBatch][2];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (inside(b + i, h)) v[i][h] = load<4>(dw + h * 8 * args.k + (b + i) * kColumns);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // Columns 2q, 2q + 1 of eight, and of the next eight (q = lane % 4).
        const float* const own = d + (b + i) * 8 + h * 2;
        const float other[2] = {__shfl_xor_sync(0xffffffffU, odd ? own[0] : own[4], 1),
                                __shfl_xor_sync(0xffffffffU, odd ? own[1] : own[5], 1)};
        const float sum[4] = {odd ? other[0] : own[0],
                              odd ? other[1] : own[1],
                              odd ? own[4] : other[0],
                              odd ? own[5] : other[1]};
#pragma unroll
        for (int c = 0; c < 4; ++c)
          v[i][h].v[c] = round_to<C>(widen<float>(v[i][h].v[c]) + sum[c]);
        if (inside(b + i, h)) store(dw + h * 8 * args.k + (b + i) * kColumns, v[i][h]);
      }
    }
  }
}

template <class C>
__device__ void consume(const WeightMaps& maps,
                        const WeightArgs<C>& args,
                        const Ring& ring,
                        int num_units,
                        int rank,
                        int group) {
  unsigned char* const staging = ring.stage(ring.shape.stages) + group * 2 * kOutBytes;
  RingPosition at;
  Unit next{};
  if (cluster_index() < num_units) next = unit_at(args, cluster_index(), rank);
  for (int u = cluster_index(); u < num_units; u += num_clusters()) {
    const Unit unit = next;
    // Looked up while the products run: nothing would hide the loads between two tiles.
    if (u + num_clusters() < num_units) next = unit_at(args, u + num_clusters(), rank);
    const int rows = unit.tile.rows, blocks = blocks_of(unit.tile);
    float d[kTileN / 2];
    multiply<Major::mn, Major::mn, kTileN>(
        d, ring, at, blocks, group, [&](int b, unsigned char* stage) {
          if ((b + 1) * kBlockK > rows) clear_rows(stage, rows - b * kBlockK, group);
        });
    if constexpr (std::is_same_v<C, float>) {
      add_by_copy_engine(d, maps, args, unit, group, staging);
    } else {
      add_from_registers(d, args, unit, group);
    }
  }
  bulk_wait<0>();
}

constexpr int kStaging = kConsumers * 2 * kOutBytes;
constexpr RingShape kShape = ring_shape(kTileN, kStaging);

template <class C>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    weight_kernel(const __grid_constant__ WeightMaps maps, const WeightArgs<C> args) {
  __shared__ std::uint64_t barriers[2 * kMaxStages];
  const Ring ring = make_ring(barriers, args.shape);
  const int num_units = *args.num_tiles * args.across * args.down;
  const int rank = static_cast<int>(cluster_rank());
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  if (group == kConsumers) {
    set_max_registers_down<kProducerRegisters>();
    if (threadIdx.x == kConsumers * kGroupThreads) produce(maps, args, ring, num_units, rank);
  } else {
    set_max_registers_up<kConsumerRegisters>();
    consume(maps, args, ring, num_units, rank, group);
  }
  cluster_sync();  // the other block may still write to this one's shared memory
}

template <class C>
void launch_weight(CudaContext& context,
                   const GroupedLinearBackwardWeight& op,
                   const GroupTiles& tiles) {
  const cudaStream_t stream = native_stream(context);
  const std::int64_t rows = op.x.dim(0), slots = op.dw.dim(0), n = op.dw.dim(1), k = op.dw.dim(2);
  WeightMaps maps;
  maps.dy = make_tensor_map(
      op.dy.data(), DType::bf16, {.sizes = {n, rows}, .strides = {n}, .box = {64, kBlockK}});
  maps.x = make_tensor_map(
      op.x.data(), DType::bf16, {.sizes = {k, rows}, .strides = {k}, .box = {64, kBlockK}});
  maps.dw =
      make_tensor_map(op.dw.data(),
                      op.dw.dtype(),
                      {.sizes = {k, n, slots}, .strides = {k, n * k}, .box = {kOutColumns, 64, 1}});
  const std::int64_t across = (k + kTileN - 1) / kTileN,
                     down = (n + kCluster * kTileM - 1) / (kCluster * kTileM);
  const WeightArgs<C> args{.dw = reinterpret_cast<C*>(op.dw.data()),
                           .n = n,
                           .k = k,
                           .across = static_cast<std::int32_t>(across),
                           .down = static_cast<std::int32_t>(down),
                           .shape = kShape,
                           .tiles = tiles.tiles,
                           .num_tiles = tiles.num_tiles};
  const auto kernel = weight_kernel<C>;
  const int kSharedBytes = kShape.bytes() + kStaging;
  allow_shared(kernel, kSharedBytes);
  kernel<<<persistent_grid(context, tiles.bound * across * down), kThreads, kSharedBytes, stream>>>(
      maps, args);
  check_launch("grouped_gemm_weight");
}

}  // namespace

bool can_tile(const GroupedLinearBackwardWeight& op) {
  const std::int64_t n = op.dw.dim(1), k = op.dw.dim(2);
  return op.x.dtype() == DType::bf16 && n >= kBlockK && k >= kBlockK &&
         can_map(op.dy.data(), n, DType::bf16) && can_map(op.x.data(), k, DType::bf16) &&
         is_aligned(op.dw.data(), 16);
}

void launch_tiled(CudaContext& context,
                  const GroupedLinearBackwardWeight& op,
                  const GroupTiles& tiles) {
  if (op.dw.dtype() == DType::bf16) return launch_weight<__nv_bfloat16>(context, op, tiles);
  launch_weight<float>(context, op, tiles);
}

}  // namespace moesaic::cuda
