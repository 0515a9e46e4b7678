// Forward and input gradient of the grouped products on tensor cores. In a block one thread feeds a ring of stages through
// TMA, two warpgroups multiply, convert and store.
#include "kernels/cuda/grouped_gemm_tiled.h"
#include "kernels/cuda/grouped_rows.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kChunkRows = 32;               // rows that go through the staging buffer at a time
constexpr int kOutBytes = kChunkRows * 128;  // of a staging buffer: 64 outputs per row

template <class C>
struct RowArgs {
  C* y;
  std::int64_t outputs;
  bool accumulate;
  RowWork work;
};

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
  RingPosition at;
  int buffer = 0;
  Unit next{};
  if (cluster_index() < num_units) next = unit_at(args.work, cluster_index(), rank);
  for (int u = cluster_index(); u < num_units; u += num_clusters()) {
    const Unit unit = next;
    // Looked up while the products run: nothing would hide the loads between two tiles.
    if (u + num_clusters() < num_units) next = unit_at(args.work, u + num_clusters(), rank);
    float d[kMaxRows / 2];
    multiply_rows<kMajorW>(d, args.work, unit, ring, at, group);
    write_result(d, args, unit, group, staging, buffer);
  }
}

constexpr int kStaging = kConsumers * 2 * kOutBytes;

template <Major kMajorW, class C>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    rows_kernel(const __grid_constant__ RowMaps maps, const RowArgs<C> args) {
  __shared__ std::uint64_t barriers[2 * kMaxStages];
  const Ring ring = make_ring(barriers, args.work.shape);
  const int num_units = args.work.num_units();
  const int rank = static_cast<int>(cluster_rank());
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  if (group == kConsumers) {
    set_max_registers_down<kProducerRegisters>();
    if (threadIdx.x == kConsumers * kGroupThreads)
      produce(maps, args.work, ring, num_units, rank, WeightLoads<kMajorW>{});
  } else {
    set_max_registers_up<kConsumerRegisters>();
    consume<kMajorW>(args, ring, num_units, rank, group);
  }
  cluster_sync();  // the other block may still write to this one's shared memory
}

template <Major kMajorW, class C>
void launch_rows(CudaContext& context,
                 const TensorView& y,
                 const ConstTensorView& rows,
                 const ConstTensorView& w,
                 bool accumulate,
                 const GroupTiles& tiles) {
  const cudaStream_t stream = native_stream(context);
  const RowMaps maps = make_row_maps(map_weights(w, kMajorW), rows);
  const RowWork work = row_work(y.dim(1), rows.dim(1), tiles, kStaging);
  const RowArgs<C> args{.y = reinterpret_cast<C*>(y.data()),
                        .outputs = y.dim(1),
                        .accumulate = accumulate,
                        .work = work};
  const auto kernel = rows_kernel<kMajorW, C>;
  const int shared = work.shape.bytes() + kStaging;
  allow_shared(kernel, shared);
  kernel<<<persistent_grid(context, tiles.bound * work.pairs), kThreads, shared, stream>>>(maps,
                                                                                           args);
  check_launch("grouped_gemm_rows");
}

}  // namespace

bool can_tile(const GroupedLinearForward& op) {
  return can_tile_rows(op.w, op.x, op.y);
}
bool can_tile(const GroupedLinearBackwardInput& op) {
  return can_tile_rows(op.w, op.dy, op.dx);
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
