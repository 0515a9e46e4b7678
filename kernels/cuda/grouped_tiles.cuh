#pragma once
// Which rows of which expert a grouped product takes together: a list that one small kernel makes on the device, so that
// the host never learns how many rows an expert has.
#include "kernels/cuda/launch.h"

namespace moesaic::cuda {

/// Consecutive rows of one expert. Tiles of an expert follow each other in the list, experts in order; an expert without
/// rows has none.
struct alignas(16) GroupTile {
  std::int32_t row;    ///< first row
  std::int32_t rows;   ///< 1 ... max_rows
  std::int32_t slot;   ///< of the expert's weights
  std::int32_t first;  ///< index of the expert's first tile
  std::int32_t count;  ///< tiles of the expert
  std::int32_t unused[3];
};

/// The list lies in scratch: `tiles` has room for the most that there can be, `num_tiles` says how many there are.
struct GroupTiles {
  const GroupTile* tiles = nullptr;
  const std::int32_t* num_tiles = nullptr;
  std::int64_t bound = 0;     ///< of num_tiles, known on the host
  std::int32_t max_rows = 0;  ///< of a tile
};

/// How an expert's rows are split.
struct TileRule {
  std::int32_t max_rows;  ///< of a tile; kAllRows: one tile per expert
  std::int32_t
      rows_step;  ///< tiles of an expert have equally many rows, up to this multiple (all but the last)
};
constexpr std::int32_t kAllRows = 1 << 30;

/// Takes the list's memory from scratch (the caller holds the mark), in dry runs too.
TensorView take_tile_scratch(CudaContext& context,
                             const ConstTensorView& slot_of_expert,
                             std::int64_t rows_bound,
                             const TileRule& rule);
/// Enqueues the kernel that fills the list. Offsets outside the rows, or an expert with rows but without a slot, stop the
/// program with a message: routing is checked where it is read.
GroupTiles make_tiles(CudaContext& context,
                      const TensorView& scratch,
                      const ConstTensorView& offsets,
                      const ConstTensorView& slot_of_expert,
                      std::int64_t rows_bound,
                      std::int64_t num_slots,
                      const TileRule& rule);

}  // namespace moesaic::cuda
