#pragma once
// A grouped product whose result goes through more than a rounding on its way out. Two warpgroups multiply, as in
// grouped_gemm_rows.cu, and leave their sums, rounded to bf16, in a tile of shared memory; a third one, the finisher, makes
// of them what is stored, while the first two are at the next tile: activations and global memory cost the tensor cores
// nothing as long as they take less time than the products.
#include "kernels/cuda/grouped_rows.cuh"

namespace moesaic::cuda {

/// Tiles are lower than a plain product's: four stages fit beside the finisher's tile, and the assembler takes no wgmma with
/// more sums in blocks of 512 threads.
constexpr int kMaxFinishedRows = 192;
constexpr int kFinishedThreads = kThreads + kGroupThreads;
constexpr int kFinisher = kConsumers + 1;  // the warpgroup after the producer's
constexpr int kMultiplyRegisters = 168, kFinisherRegisters = 136;
constexpr int kHalfPitch = 128;  // bytes of a row of a warpgroup's half of the tile: 64 outputs
constexpr int kBarrierFull = 1, kBarrierFree = 1 + kConsumers;  // + the multiplying warpgroup
constexpr int kMeeting = 2 * kGroupThreads;

inline TileRule finished_row_tiles(std::int64_t rows_bound, std::int64_t experts) {
  TileRule rule = row_tiles(rows_bound, experts);
  rule.max_rows = std::min(rule.max_rows, kMaxFinishedRows);
  return rule;
}
/// The tile's halves, and what the finisher wants of shared memory for itself behind them.
template <class Finish>
int finished_bytes(const GroupTiles& tiles) {
  return kConsumers * tiles.max_rows * kHalfPitch + Finish::kOwnBytes;
}

/// The sums of a warpgroup, 64 outputs (M) x rows, rounded to bf16: a row of 128 bytes per token, swizzled.
__device__ __forceinline__ void hand_over(const float (&d)[kMaxFinishedRows / 2],
                                          int rows,
                                          unsigned char* half) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp,
            warp = static_cast<int>(threadIdx.x) % kGroupThreads / kWarp;
  const auto offset = static_cast<std::uint32_t>((lane / 16 * 8 + lane % 8) * kHalfPitch +
                                                 warp * 32 + lane / 8 % 2 * 16);
#pragma unroll
  for (int r = 0; r < kMaxFinishedRows; r += kRowStep) {
    const float* const v = d + r / 2;
    if (r < rows) {
      stmatrix_x4_trans(half + swizzled_128(offset + static_cast<std::uint32_t>(r * kHalfPitch)),
                        {pack_bf16(v[0], v[1]),
                         pack_bf16(v[2], v[3]),
                         pack_bf16(v[4], v[5]),
                         pack_bf16(v[6], v[7])});
    }
  }
}

/// The finisher's view of the tile: group's 64 outputs of unit.tile.rows rows lie in half(group) between arrived(group) and
/// done(group), which each thread calls once for each group of a unit, group 0 first.
struct FinishedTile {
  unsigned char* base;
  int half_bytes;
  bool is_last;  // unit of this block
  __device__ __forceinline__ const unsigned char* half(int group) const {
    return base + group * half_bytes;
  }
  /// Finish::kOwnBytes that nobody else touches.
  __device__ __forceinline__ unsigned char* own() const { return base + kConsumers * half_bytes; }
  __device__ __forceinline__ void arrived(int group) const {
    named_barrier_sync(kBarrierFull + group, kMeeting);
  }
  __device__ __forceinline__ void done(int group) const {
    if (!is_last) named_barrier_arrive(kBarrierFree + group, kMeeting);
  }
};

/// `finish(unit, tile)` is called by the finisher for each unit.
template <Major kMajorW, class LoadWeights, class Finish>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kFinishedThreads, 1)
    finished_kernel(const __grid_constant__ RowMaps maps,
                    const RowWork work,
                    const int half_bytes,
                    const Finish finish) {
  __shared__ std::uint64_t barriers[2 * kMaxStages];
  const Ring ring = make_ring(barriers, work.shape);
  unsigned char* const tile = ring.stage(work.shape.stages);
  const int num_units = work.num_units(), rank = static_cast<int>(cluster_rank());
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  if (group == kConsumers) {
    set_max_registers_down<kProducerRegisters>();
    if (threadIdx.x == kConsumers * kGroupThreads)
      produce(maps, work, ring, num_units, rank, LoadWeights{});
  } else if (group == kFinisher) {
    set_max_registers_up<kFinisherRegisters>();
    int left = (num_units - cluster_index() + num_clusters() - 1) / num_clusters();
    for_each_unit(work, num_units, rank, [&](const Unit& unit) {
      finish(unit, FinishedTile{tile, half_bytes, --left == 0});
    });
  } else {
    set_max_registers_up<kMultiplyRegisters>();
    RingPosition at;
    bool first = true;
    for_each_unit(work, num_units, rank, [&](const Unit& unit) {
      float d[kMaxFinishedRows / 2];
      multiply_rows<kMajorW>(d, work, unit, ring, at, group);
      if (!first) named_barrier_sync(kBarrierFree + group, kMeeting);
      first = false;
      hand_over(d, unit.tile.rows, tile + group * half_bytes);
      named_barrier_arrive(kBarrierFull + group, kMeeting);
    });
  }
  cluster_sync();  // the other block may still write to this one's shared memory
}

template <Major kMajorW, class LoadWeights, class Finish>
void launch_finished(CudaContext& context,
                     const CUtensorMap& weights,
                     const ConstTensorView& rows,
                     std::int64_t outputs,
                     const GroupTiles& tiles,
                     const Finish& finish,
                     const char* name) {
  const RowMaps maps = make_row_maps(weights, rows);
  const RowWork work = row_work(outputs, rows.dim(1), tiles, finished_bytes<Finish>(tiles));
  const auto kernel = finished_kernel<kMajorW, LoadWeights, Finish>;
  const int shared = work.shape.bytes() + finished_bytes<Finish>(tiles);
  const cudaStream_t stream = native_stream(context);
  allow_shared(kernel, shared);
  kernel<<<persistent_grid(context, tiles.bound * work.pairs), kFinishedThreads, shared, stream>>>(
      maps, work, tiles.max_rows * kHalfPitch, finish);
  check_launch(name);
}

}  // namespace moesaic::cuda
