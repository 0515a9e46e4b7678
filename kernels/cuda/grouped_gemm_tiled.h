#pragma once
// The tensor-core kernels behind the grouped products, for bf16 operands. can_tile() says whether sizes, types and
// alignment suit them; the tiles' scratch is taken by the caller.
#include "kernels/cuda/grouped_tiles.cuh"
#include "kernels/ops/grouped_gemm.h"

namespace moesaic::cuda {

/// Rows of a tile are a side of a wgmma product, in steps of 16 rows. Few rows per expert: smaller tiles, so that shared
/// memory holds more of the weights on their way, which then set the pace. The mean is of the bound: the host knows no more.
constexpr std::int32_t kRowStep = 16, kMaxRows = 256, kMinTileRows = 32;
inline TileRule row_tiles(std::int64_t rows_bound, std::int64_t experts) {
  const std::int64_t usual = (rows_bound + rows_bound / 4) / std::max<std::int64_t>(experts, 1);
  for (const std::int32_t rows : {kMinTileRows, 64, 96, 128, 192}) {
    if (usual <= rows) return {.max_rows = rows, .rows_step = kRowStep};
  }
  return {.max_rows = kMaxRows, .rows_step = kRowStep};
}
/// A weight gradient sums over all rows of its expert.
constexpr TileRule kExpertTiles{.max_rows = kAllRows, .rows_step = 16};

bool can_tile(const GroupedLinearForward& op);
bool can_tile(const GroupedLinearBackwardInput& op);
bool can_tile(const GroupedLinearBackwardWeight& op);

void launch_tiled(CudaContext& context, const GroupedLinearForward& op, const GroupTiles& tiles);
void launch_tiled(CudaContext& context,
                  const GroupedLinearBackwardInput& op,
                  const GroupTiles& tiles);
void launch_tiled(CudaContext& context,
                  const GroupedLinearBackwardWeight& op,
                  const GroupTiles& tiles);

}  // namespace moesaic::cuda
