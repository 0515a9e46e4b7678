#pragma once
// The tensor-core kernels behind the grouped products, for bf16 operands. can_tile() says whether sizes, types and
// alignment suit them; the tiles' scratch is taken by the caller.
#include "kernels/cuda/grouped_tiles.cuh"
#include "kernels/ops/grouped_gemm.h"

namespace moesaic::cuda {

/// Rows of a tile are a side of a wgmma product, in steps of 16 rows.
constexpr TileRule kRowTiles{.max_rows = 256, .rows_step = 16};
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
