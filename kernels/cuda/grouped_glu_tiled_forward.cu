// Up and gate projection with the activation behind it. The weights [slots, 2 width, k] are read as [slots, width / 8,
// gate or up, 8, k], so that of 16 outputs 8 are gates and 8 the ups that go with them: a thread of the finisher finds both
// in two pieces of 16 bytes side by side.
#include "kernels/cuda/glu_math.cuh"
#include "kernels/cuda/grouped_finish.cuh"
#include "kernels/cuda/grouped_glu_tiled.h"

namespace moesaic::cuda {
namespace {

constexpr int kPiece = 8;  // gates, then 8 ups

struct PairedWeightLoads {
  __device__ __forceinline__ void operator()(unsigned char* stage,
                                             const CUtensorMap* weights,
                                             std::uint64_t* full,
                                             int depth,
                                             const Unit& unit) const {
    tma_load_5d(stage, weights, full, depth, 0, 0, unit.output / (2 * kPiece), unit.tile.slot);
  }
};

CUtensorMap map_paired_weights(const ConstTensorView& w) {
  const std::int64_t width = w.dim(1) / 2, k = w.dim(2);
  return make_tensor_map(w.data(),
                         DType::bf16,
                         {.sizes = {k, kPiece, 2, width / kPiece, w.dim(0)},
                          .strides = {k, width * k, kPiece * k, 2 * width * k},
                          .box = {kBlockK, kPiece, 2, kTileM / (2 * kPiece), 1}});
}

template <class Act>
struct FinishForward {
  using Piece = Vec<__nv_bfloat16, kPiece>;
  static constexpr int kOwnBytes = 0;
  __nv_bfloat16* h;
  __nv_bfloat16* gate_up;  // or null
  std::int64_t width;
  Act act;

  __device__ __forceinline__ void operator()(const Unit& unit, const FinishedTile& tile) const {
    for (int group = 0; group < kConsumers; ++group) {
      tile.arrived(group);
      finish_half(unit, group, tile.half(group));
      tile.done(group);
    }
  }

 private:
  __device__ __forceinline__ void finish_half(const Unit& unit,
                                              int group,
                                              const unsigned char* half) const {
    constexpr int kPairs = 64 / (2 * kPiece);  // of gates and ups in a row of the half
    const int thread = static_cast<int>(threadIdx.x) % kGroupThreads, pair = thread % kPairs;
    const std::int64_t column = unit.output / 2 + (group * kPairs + pair) * kPiece;
    if (column >= width) return;
#pragma unroll 2
    for (int row = thread / kPairs; row < unit.tile.rows; row += kGroupThreads / kPairs) {
      const auto offset = static_cast<std::uint32_t>(row * kHalfPitch + pair * 2 * 16);
      const Piece gate = *reinterpret_cast<const Piece*>(half + swizzled_128(offset)),
                  up = *reinterpret_cast<const Piece*>(half + swizzled_128(offset + 16));
      const std::int64_t t = unit.tile.row + row;
      if (gate_up != nullptr) {
        store<kPiece>(gate_up + 2 * t * width + column, gate);
        store<kPiece>(gate_up + (2 * t + 1) * width + column, up);
      }
      store<kPiece>(h + t * width + column, glu_values<float>(act, gate, up));
    }
  }
};

template <class Act>
void launch_forward(CudaContext& context, const GroupedGluForward& op, const GroupTiles& tiles) {
  const FinishForward<Act> finish{.h = device_data<bf16>(op.h),
                                  .gate_up = device_data<bf16>(op.gate_up),
                                  .width = op.h.dim(1),
                                  .act = Act(op.activation)};
  launch_finished<Major::k, PairedWeightLoads>(
      context, map_paired_weights(op.w), op.x, op.w.dim(1), tiles, finish, "grouped_glu_forward");
}

}  // namespace

TileRule fused_row_tiles(std::int64_t rows_bound, std::int64_t experts) {
  return finished_row_tiles(rows_bound, experts);
}

bool can_fuse(const GroupedGluForward& op) {
  return can_tile_rows(op.w, op.x, op.h) && op.h.dim(1) % kPiece == 0 &&
         is_aligned(op.gate_up.data(), 16);
}

void launch_fused(CudaContext& context, const GroupedGluForward& op, const GroupTiles& tiles) {
  if (op.activation.kind == GluKind::situ)
    return launch_forward<SituGlu<float, true>>(context, op, tiles);
  launch_forward<SwiGlu<float, true>>(context, op, tiles);
}

}  // namespace moesaic::cuda
