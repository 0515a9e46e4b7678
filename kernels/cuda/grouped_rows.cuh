#pragma once
// What the grouped tensor-core kernels share whose result is rows of tokens.
//
// Operands are swapped: the weights' outputs are the M side of wgmma (64 per multiplying warpgroup), the tokens the N side,
// so that a tile can have any multiple of 16 rows up to 256 and few rows do not waste the tensor cores. A pair of blocks (a
// cluster) takes the same rows and neighbouring 128 outputs; each loads half of the rows' operand for both (multicast).
//
// Rows behind a tile's last one belong to the next expert, of this call or of another, or to nobody: they reach result rows
// that are not stored. The height of tiles follows from the call's rows and experts, and decides how many stages there are
// and how wide wgmma is, not in which order an element is summed.
#include "kernels/cuda/grouped_gemm_tiled.h"
#include "kernels/cuda/grouped_ring.cuh"
#include "kernels/cuda/tensor_map.h"

namespace moesaic::cuda {

constexpr int kNumHalves = kMaxRows / kRowStep;  // boxes of 8, 16 ... 128 rows

struct RowMaps {
  CUtensorMap weights;
  CUtensorMap half_rows[kNumHalves];  // [i]: a box of 8 (i + 1) rows
};

/// What a kernel does, cut into units: a tile's rows times 256 outputs, 128 for each block of a cluster.
struct RowWork {
  std::int32_t blocks;  // of 64 terms of the sum
  std::int32_t pairs;   // of 128 outputs
  RingShape shape;
  const GroupTile* tiles;
  const std::int32_t* num_tiles;

  __device__ __forceinline__ int num_units() const { return *num_tiles * pairs; }
};
struct Unit {
  GroupTile tile;
  std::int32_t output;  // first of the block's 128
};

// Rows are innermost: blocks that run at a time share the weights they read, if the expert has several tiles.
__device__ __forceinline__ Unit unit_at(const RowWork& work, int unit, int rank) {
  const GroupTile some = work.tiles[unit / work.pairs];
  const int local = unit - some.first * work.pairs;
  return {some.count == 1 ? some : work.tiles[some.first + local % some.count],
          (local / some.count * kCluster + rank) * kTileM};
}
__device__ __forceinline__ int padded_rows(const GroupTile& tile) {
  return (tile.rows + kRowStep - 1) / kRowStep * kRowStep;
}

/// Calls f for the units of this block. The next one is looked up while f works: nothing would hide the loads between two.
template <class F>
__device__ __forceinline__ void for_each_unit(const RowWork& work, int num_units, int rank, F&& f) {
  Unit next{};
  if (cluster_index() < num_units) next = unit_at(work, cluster_index(), rank);
  for (int u = cluster_index(); u < num_units; u += num_clusters()) {
    const Unit unit = next;
    if (u + num_clusters() < num_units) next = unit_at(work, u + num_clusters(), rank);
    f(unit);
  }
}

/// W as the A operand lies K-major (forward) or transposed (input gradient).
template <Major kMajorW>
struct WeightLoads {
  __device__ __forceinline__ void operator()(unsigned char* stage,
                                             const CUtensorMap* weights,
                                             std::uint64_t* full,
                                             int depth,
                                             const Unit& unit) const {
    if constexpr (kMajorW == Major::k) {
      tma_load_3d(stage, weights, full, depth, unit.output, unit.tile.slot);
    } else {
      tma_load_3d(stage, weights, full, unit.output, depth, unit.tile.slot);
      tma_load_3d(stage + kAtomTile, weights, full, unit.output + 64, depth, unit.tile.slot);
    }
  }
};

/// One thread. `load_weights` fetches the kBytesM of the block's 128 outputs.
template <class LoadWeights>
__device__ __forceinline__ void produce(const RowMaps& maps,
                                        const RowWork& work,
                                        const Ring& ring,
                                        int num_units,
                                        int rank,
                                        const LoadWeights& load_weights) {
  RingPosition at;
  for (int u = cluster_index(); u < num_units; u += num_clusters()) {
    const Unit unit = unit_at(work, u, rank);
    const int half = padded_rows(unit.tile) / 2;
    const CUtensorMap* const rows_map = &maps.half_rows[half / 8 - 1];
    const auto bytes = static_cast<std::uint32_t>(kBytesM + half * 2 * kRowBytes);
    for (int b = 0; b < work.blocks; ++b, at.advance(ring)) {
      std::uint64_t* const full = ring.full + at.stage;
      unsigned char* const stage = ring.stage(at.stage);
      mbarrier_wait(ring.empty + at.stage, at.phase ^ 1U);
      mbarrier_arrive_expect(full, bytes);
      const int depth = b * kBlockK;
      load_weights(stage, &maps.weights, full, depth, unit);
      tma_load_2d_multicast(stage + kBytesM + rank * half * kRowBytes,
                            rows_map,
                            full,
                            depth,
                            unit.tile.row + rank * half,
                            kBothBlocks);
    }
  }
}

/// A warpgroup's 64 outputs x rows of a unit: the first padded_rows / 2 of d, in wgmma's order (wgmma.cuh).
template <Major kMajorW, int kSums>
__device__ __forceinline__ void multiply_rows(float (&d)[kSums],
                                              const RowWork& work,
                                              const Unit& unit,
                                              const Ring& ring,
                                              RingPosition& at,
                                              int group) {
  const auto nothing = [](int, unsigned char*) {};
  switch (padded_rows(unit.tile)) {
#define MOESAIC_ROWS(N)                                                         \
  case N:                                                                       \
    if constexpr (N / 2 <= kSums)                                               \
      multiply<kMajorW, Major::k, N>(d, ring, at, work.blocks, group, nothing); \
    else                                                                        \
      __trap();                                                                 \
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
}

// ---- host

inline CUtensorMap map_weights(const ConstTensorView& w, Major major) {
  const std::int64_t n = w.dim(1), k = w.dim(2);
  const std::int64_t height = major == Major::k ? kTileM : kBlockK;
  return make_tensor_map(
      w.data(),
      DType::bf16,
      {.sizes = {k, n, w.dim(0)}, .strides = {k, n * k}, .box = {kBlockK, height, 1}});
}

inline RowMaps make_row_maps(const CUtensorMap& weights, const ConstTensorView& rows) {
  RowMaps maps;
  maps.weights = weights;
  for (int i = 0; i < kNumHalves; ++i) {
    maps.half_rows[i] = make_tensor_map(rows.data(),
                                        DType::bf16,
                                        {.sizes = {rows.dim(1), rows.dim(0)},
                                         .strides = {rows.dim(1)},
                                         .box = {kBlockK, 8 * (i + 1)}});
  }
  return maps;
}

inline RowWork row_work(std::int64_t outputs,
                        std::int64_t depth,
                        const GroupTiles& tiles,
                        int staging_bytes) {
  constexpr std::int64_t kPair = kCluster * kTileM;
  return {.blocks = static_cast<std::int32_t>((depth + kBlockK - 1) / kBlockK),
          .pairs = static_cast<std::int32_t>((outputs + kPair - 1) / kPair),
          .shape = ring_shape(tiles.max_rows, staging_bytes),
          .tiles = tiles.tiles,
          .num_tiles = tiles.num_tiles};
}

/// Products of less than a block of 64 leave most of a tile empty.
inline bool can_tile_rows(const ConstTensorView& w,
                          const ConstTensorView& rows,
                          const ConstTensorView& y) {
  return w.dtype() == DType::bf16 && w.dim(1) >= kBlockK && w.dim(2) >= kBlockK &&
         can_map(w.data(), w.dim(2), DType::bf16) && can_map(w.data(), w.dim(1), DType::bf16) &&
         is_aligned(rows.data(), 16) && is_aligned(y.data(), 16);
}

}  // namespace moesaic::cuda
