// Grouped gated linear units: fused where there is a kernel for it, else the two ops they consist of.
#include "kernels/cuda/grouped_gemm_tiled.h"
#include "kernels/cuda/grouped_glu_tiled.h"
#include "kernels/grouped_glu_parts.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): launch helpers

constexpr TileRule kSmallestTiles{.max_rows = kMinTileRows, .rows_step = 1};

template <class Op>
bool fuses(CudaContext& context, const Op& op) {
  const bool fused = may_fuse(context) && can_fuse(op);
  report_path(context, op, fused ? "fused" : "separate");
  return fused;
}

// Calls f(tiles) unless there is nothing to do or nothing may reach the device; the mark is the caller's.
template <class Op, class F>
void with_tiles(CudaContext& context, const Op& op, F&& f) {
  const std::int64_t rows = op.h.dim(0), experts = op.slot_of_expert.dim(0);
  const TensorView scratch = take_tile_scratch(context, op.slot_of_expert, rows, kSmallestTiles);
  if (is_dry(context) || rows == 0 || experts == 0) return;
  f(make_tiles(context,
               scratch,
               op.offsets,
               op.slot_of_expert,
               rows,
               op.w.dim(0),
               fused_row_tiles(rows, experts)));
}

}  // namespace

void launch(CudaContext& context, const GroupedGluForward& op) {
  if (!fuses(context, op)) return launch_parts(context, op);
  const Arena::Mark mark(context.scratch);
  with_tiles(context, op, [&](const GroupTiles& tiles) { launch_fused(context, op, tiles); });
}

void launch(CudaContext& context, const GroupedGluBackward& op) {
  if (!fuses(context, op)) return launch_parts(context, op);
  const Arena::Mark mark(context.scratch);
  const TensorView parts = take_row_parts(context, op);
  with_tiles(
      context, op, [&](const GroupTiles& tiles) { launch_fused(context, op, parts, tiles); });
}

}  // namespace moesaic
