// Forward and input gradient of the grouped products on tensor cores.
//
// Operands are swapped: the weights' outputs are the M side of wgmma (64 per consumer warpgroup), the tokens the N side, so
// that a tile can have any multiple of 16 rows up to 256 and few rows do not waste the tensor cores. A pair of blocks (a
// cluster) takes the same rows and neighbouring 128 outputs; each loads half of the rows' operand for both (multicast). In a
// block one thread feeds a ring of stages through TMA, two warpgroups multiply, convert and store.
//
// Rows behind a tile's last one belong to the next expert or to nobody: they reach result rows that are not stored.
#include "kernels/cuda/grouped_gemm_tiled.h"
#include "kernels/cuda/grouped_ring.cuh"
#include "kernels/cuda/tensor_map.h"

namespace moesaic::cuda {
namespace {

constexpr int kNumHalves = kMaxRows / kRowStep;  // boxes of 8, 16 ... 128 rows
constexpr int kChunkRows = 32;               // rows that go through the staging buffer at a time
constexpr int kOutBytes = kChunkRows * 128;  // of a staging buffer: 64 outputs per row

struct RowMaps {
  CUtensorMap weights;
  CUtensorMap half_rows[kNumHalves];  // [i]: a box of 8 (i + 1) rows
};

template <class C>
struct RowArgs {
  C* y;
  std::int64_t outputs;
  std::int32_t blocks;  // of 64 terms of the sum
  std::int32_t pairs;   // of 128 outputs
  bool accumulate;
  RingShape shape;
  const GroupTile* tiles;
  const std::int32_t* num_tiles;
};

struct Unit {
  GroupTile tile;
  std::int32_t output;  // first of the block's 128
};

// Rows are innermost: blocks that run at a time share the weights they read, if the expert has several tiles.
template <class C>
__device__ __forceinline__ Unit unit_at(const RowArgs<C>& args, int unit, int rank) {
  const GroupTile some = args.tiles[unit / args.pairs];
  const int local = unit - some.first * args.pairs;
  return {some.count == 1 ? some : args.tiles[some.first + local % some.count],
          (local / some.count * kCluster + rank) * kTileM};
}
__device__ __forceinline__ int padded_rows(const GroupTile& tile) {
  return (tile.rows + kRowStep - 1) / kRowStep * kRowStep;
}

// One thread. W as the A operand lies K-major (forward) or transposed (input gradient).
template <Major kMajorW, class C>
__device__ void produce(
    const RowMaps& maps, const RowArgs<C>& args, const Ring& ring, int num_units, int rank) {
  RingPosition at;
  for (int u = cluster_index(); u < num_units; u += num_clusters()) {
    const Unit unit = unit_at(args, u, rank);
    const int half = padded_rows(unit.tile) / 2;
    const CUtensorMap* const rows_map = &maps.half_rows[half / 8 - 1];
    const auto bytes = static_cast<std::uint32_t>(kBytesM + half * 2 * kRowBytes);
    for (int b = 0; b < args.blocks; ++b, at.advance(ring)) {
      std::uint64_t* const full = ring.full + at.stage;
      unsigned char* const stage = ring.stage(at.stage);
      mbarrier_wait(ring.empty + at.stage, at.phase ^ 1U);
      mbarrier_arrive_expect(full, bytes);
      const int depth = b * kBlockK;
      if constexpr (kMajorW == Major::k) {
        tma_load_3d(stage, &maps.weights, full, depth, unit.output, unit.tile.slot);
      } else {
        tma_load_3d(stage, &maps.weights, full, unit.output, depth, unit.tile.slot);
        tma_load_3d(
            stage + kAtomTile, &maps.weights, full, unit.output + 64, depth, unit.tile.slot);
      }
      tma_load_2d_multicast(stage + kBytesM + rank * half * kRowBytes,
                            rows_map,
                            full,
                            depth,
                            unit.tile.row + rank * half,
                            kBothBlocks);
    }
  }
}

// Moves a chunk of rows x 64 outputs between staging (128-byte rows, swizzled) and the result.
template <bool kStore>
__device__ __forceinline__ void move_chunk(
    unsigned char* staging, __nv_bfloat16* y, std::int64_t pitch, int rows, std::int64_t outputs) {
  constexpr int kPieces = 128 / 16;
#pragma unroll
  for (int n = 0; n < kChunkRows * kPieces / kGroupThreads; ++n) {
    const int index = static_cast<int>(threadIdx.x) % kGroupThreads + n * kGroupThreads;
    const int row = index / kPieces, piece = index % kPieces;
    if (row >= rows || piece * 8 >= outputs) continue;
    auto* const inside = reinterpret_cast<uint4*>(
        staging + swizzled_128(static_cast<std::uint32_t>(row * 128 + piece * 16)));
    auto* const outside = reinterpret_cast<uint4*>(y + row * pitch + piece * 8);
    if constexpr (kStore) {
      *outside = *inside;
    } else {
      *inside = *outside;
    }
  }
}

// The sums of a warpgroup, 64 outputs (M) x rows, to bf16 rows: transposed by stmatrix on the way to shared memory, then
// stored in rows of 128 bytes. The two staging buffers alternate, so one barrier per chunk is enough.
__device__ __forceinline__ void write_result(const float (&d)[kMaxRows / 2],
                                             const RowArgs<__nv_bfloat16>& args,
                                             const Unit& unit,
                                             int group,
                                             unsigned char* staging,
                                             int& buffer) {
  const std::int64_t output = unit.output + group * 64;
  const int lane = static_cast<int>(threadIdx.x) % 32,
            warp = static_cast<int>(threadIdx.x) % kGroupThreads / 32;
  const auto offset =
      static_cast<std::uint32_t>((lane / 16 * 8 + lane % 8) * 128 + warp * 32 + lane / 8 % 2 * 16);
#pragma unroll
  for (int c = 0; c < kMaxRows; c += kChunkRows) {
    const int rows = unit.tile.rows - c;
    if (rows > 0) {
      unsigned char* const chunk = staging + buffer * kOutBytes;
      buffer ^= 1;
      __nv_bfloat16* const y = args.y + (unit.tile.row + c) * args.outputs + output;
      if (args.accumulate) {
        move_chunk<false>(chunk, y, args.outputs, rows, args.outputs - output);
        named_barrier_sync(1 + group, kGroupThreads);
      }
#pragma unroll
      for (int j = 0; j < kChunkRows / 8; j += 2) {
        unsigned char* const place =
            chunk + swizzled_128(offset + static_cast<std::uint32_t>(j * 8 * 128));
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i)
          v[i] = d[c / 2 + 4 * j + i];
        if (args.accumulate) {
          std::uint32_t old[4];
          ldmatrix_x4_trans(old, place);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            v[2 * i] += __uint_as_float(old[i] << 16);
            v[2 * i + 1] += __uint_as_float(old[i] & 0xffff0000U);
          }
        }
        stmatrix_x4_trans(place,
                          {pack_bf16(v[0], v[1]),
                           pack_bf16(v[2], v[3]),
                           pack_bf16(v[4], v[5]),
                           pack_bf16(v[6], v[7])});
      }
      named_barrier_sync(1 + group, kGroupThreads);
      move_chunk<true>(chunk, y, args.outputs, rows, args.outputs - output);
    }
  }
}

// To f32 rows, straight from the registers: eight lanes write the 32 bytes of a sector.
__device__ __forceinline__ void write_result(const float (&d)[kMaxRows / 2],
                                             const RowArgs<float>& args,
                                             const Unit& unit,
                                             int group,
                                             unsigned char*,
                                             int&) {
  const int lane = static_cast<int>(threadIdx.x) % 32,
            warp = static_cast<int>(threadIdx.x) % kGroupThreads / 32;
  const std::int64_t output = unit.output + group * 64 + warp * 16 + lane / 4;
  const bool inside[2] = {output < args.outputs, output + 8 < args.outputs};
  float* p = args.y + (unit.tile.row + lane % 4 * 2) * args.outputs + output;
  int rows = unit.tile.rows - lane % 4 * 2;  // from p's on
#pragma unroll
  for (int j = 0; j < kMaxRows / 8; ++j, p += 8 * args.outputs, rows -= 8) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* const q = p + i % 2 * args.outputs + i / 2 * 8;
      if (i % 2 < rows && inside[i / 2]) *q = args.accumulate ? *q + d[4 * j + i] : d[4 * j + i];
    }
  }
}

template <Major kMajorW, class C>
__device__ void consume(
    const RowArgs<C>& args, const Ring& ring, int num_units, int rank, int group) {
  unsigned char* const staging = ring.stage(ring.shape.stages) + group * 2 * kOutBytes;
  const auto nothing = [](int, unsigned char*) {};
  RingPosition at;
  int buffer = 0;
  Unit next{};
  if (cluster_index() < num_units) next = unit_at(args, cluster_index(), rank);
  for (int u = cluster_index(); u < num_units; u += num_clusters()) {
    const Unit unit = next;
    // Looked up while the products run: nothing would hide the loads between two tiles.
    if (u + num_clusters() < num_units) next = unit_at(args, u + num_clusters(), rank);
    float d[kMaxRows / 2];
    switch (padded_rows(unit.tile)) {
#define MOESAIC_ROWS(N)                                                       \
  case N:                                                                     \
    multiply<kMajorW, Major::k, N>(d, ring, at, args.blocks, group, nothing); \
    break;
      MOESAIC_ROWS(16)
      MOESAIC_ROWS(32)
      MOESAIC_ROWS(48)
      MOESAIC_ROWS(64)
      MOESAIC_ROWS(80)
      MOESAIC_ROWS(96)
      MOESAIC_ROWS(112)
      MOESAIC_ROWS(128)
      MOESAIC_ROWS(144)
      MOESAIC_ROWS(160)
      MOESAIC_ROWS(176)
      MOESAIC_ROWS(192)
      MOESAIC_ROWS(208)
      MOESAIC_ROWS(224)
      MOESAIC_ROWS(240)
      MOESAIC_ROWS(256)
#undef MOESAIC_ROWS
      default:
        __trap();  // a list with another rule
    }
    write_result(d, args, unit, group, staging, buffer);
  }
}

constexpr int kStaging = kConsumers * 2 * kOutBytes;

template <Major kMajorW, class C>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    rows_kernel(const __grid_constant__ RowMaps maps, const RowArgs<C> args) {
  __shared__ std::uint64_t barriers[2 * kMaxStages];
  const Ring ring = make_ring(barriers, args.shape);
  const int num_units = *args.num_tiles * args.pairs;
  const int rank = static_cast<int>(cluster_rank());
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  if (group == kConsumers) {
    set_max_registers_down<kProducerRegisters>();
    if (threadIdx.x == kConsumers * kGroupThreads)
      produce<kMajorW>(maps, args, ring, num_units, rank);
  } else {
    set_max_registers_up<kConsumerRegisters>();
    consume<kMajorW>(args, ring, num_units, rank, group);
  }
  cluster_sync();  // the other block may still write to this one's shared memory
}

RowMaps make_maps(const ConstTensorView& w, const ConstTensorView& rows, Major major) {
  const std::int64_t n = w.dim(1), k = w.dim(2);
  RowMaps maps;
  const std::int64_t height = major == Major::k ? kTileM : kBlockK;
  maps.weights = make_tensor_map(
      w.data(),
      DType::bf16,
      {.sizes = {k, n, w.dim(0)}, .strides = {k, n * k}, .box = {kBlockK, height, 1}});
  for (int i = 0; i < kNumHalves; ++i) {
    maps.half_rows[i] = make_tensor_map(rows.data(),
                                        DType::bf16,
                                        {.sizes = {rows.dim(1), rows.dim(0)},
                                         .strides = {rows.dim(1)},
                                         .box = {kBlockK, 8 * (i + 1)}});
  }
  return maps;
}

template <Major kMajorW, class C>
void launch_rows(CudaContext& context,
                 const TensorView& y,
                 const ConstTensorView& rows,
                 const ConstTensorView& w,
                 bool accumulate,
                 const GroupTiles& tiles) {
  const cudaStream_t stream = native_stream(context);
  const RowMaps maps = make_maps(w, rows, kMajorW);
  const std::int64_t pairs = (y.dim(1) + kCluster * kTileM - 1) / (kCluster * kTileM);
  const RingShape shape = ring_shape(tiles.max_rows, kStaging);
  const RowArgs<C> args{.y = reinterpret_cast<C*>(y.data()),
                        .outputs = y.dim(1),
                        .blocks = static_cast<std::int32_t>((rows.dim(1) + kBlockK - 1) / kBlockK),
                        .pairs = static_cast<std::int32_t>(pairs),
                        .accumulate = accumulate,
                        .shape = shape,
                        .tiles = tiles.tiles,
                        .num_tiles = tiles.num_tiles};
  const auto kernel = rows_kernel<kMajorW, C>;
  const int shared = shape.bytes() + kStaging;
  allow_shared(kernel, shared);
  kernel<<<persistent_grid(context, tiles.bound * pairs), kThreads, shared, stream>>>(maps, args);
  check_launch("grouped_gemm_rows");
}

// Products of less than a block of 64 leave most of a tile empty.
bool fits(const ConstTensorView& w, const ConstTensorView& rows, const ConstTensorView& y) {
  return w.dtype() == DType::bf16 && w.dim(1) >= kBlockK && w.dim(2) >= kBlockK &&
         can_map(w.data(), w.dim(2), DType::bf16) && can_map(w.data(), w.dim(1), DType::bf16) &&
         is_aligned(rows.data(), 16) && is_aligned(y.data(), 16);
}

}  // namespace

bool can_tile(const GroupedLinearForward& op) {
  return fits(op.w, op.x, op.y);
}
bool can_tile(const GroupedLinearBackwardInput& op) {
  return fits(op.w, op.dy, op.dx);
}

void launch_tiled(CudaContext& context, const GroupedLinearForward& op, const GroupTiles& tiles) {
  if (op.y.dtype() == DType::f32)
    return launch_rows<Major::k, float>(context, op.y, op.x, op.w, op.accumulate, tiles);
  launch_rows<Major::k, __nv_bfloat16>(context, op.y, op.x, op.w, op.accumulate, tiles);
}
void launch_tiled(CudaContext& context,
                  const GroupedLinearBackwardInput& op,
                  const GroupTiles& tiles) {
  if (op.dx.dtype() == DType::f32)
    return launch_rows<Major::mn, float>(context, op.dx, op.dy, op.w, op.accumulate, tiles);
  launch_rows<Major::mn, __nv_bfloat16>(context, op.dx, op.dy, op.w, op.accumulate, tiles);
}

}  // namespace moesaic::cuda
