#pragma once
// The tensor-core kernels behind the grouped gated linear units, for bf16 operands. can_fuse() says whether sizes, types and
// alignment suit them; the lists of tiles are the caller's.
#include "kernels/cuda/grouped_tiles.cuh"
#include "kernels/ops/grouped_glu.h"

namespace moesaic::cuda {

bool can_fuse(const GroupedGluForward& op);
/// Also whether the sums are long enough to hide what comes after them.
bool can_fuse(const GroupedGluBackward& op);

/// How the rows are split for both.
TileRule fused_row_tiles(std::int64_t rows_bound, std::int64_t experts);

void launch_fused(CudaContext& context, const GroupedGluForward& op, const GroupTiles& tiles);
/// Scratch for the parts of drow_weight (the caller holds the mark); empty if that is not asked for.
TensorView take_row_parts(CudaContext& context, const GroupedGluBackward& op);
void launch_fused(CudaContext& context,
                  const GroupedGluBackward& op,
                  const TensorView& parts,
                  const GroupTiles& tiles);

}  // namespace moesaic::cuda
