#pragma once
// The stable counting sort of the router's assignments by expert, shared by the ops that need it.
#include <cstdint>

#include "kernels/ops/op.h"

namespace moesaic::cuda {

constexpr int kSortTile = 256;  ///< assignments that one block ranks among each other

/// Where every assignment comes among those of its expert, in the order of the assignments.
struct ExpertSort {
  std::int32_t* rank = nullptr;     ///< [assignments] among its expert's in its tile; -1: left out
  std::int32_t* before = nullptr;   ///< [tiles, experts] the expert's assignments in earlier tiles
  std::int32_t* offsets = nullptr;  ///< [experts + 1] where an expert's assignments start
  std::int64_t experts = 0;

#ifdef __CUDACC__
  __device__ std::int32_t position(std::int64_t assignment, std::int32_t expert) const {
    const std::int32_t r = rank[assignment];
    return r < 0 ? -1 : before[assignment / kSortTile * experts + expert] + r;
  }
#endif
};

/// The counts of all tiles, [tiles, experts] i32: scratch of sort_by_expert().
TensorView take_sort_scratch(Arena& arena, std::int64_t assignments, std::int64_t experts);

/// Enqueues the sort. `rank` [assignments] i32 and `offsets` [experts + 1] i32 are overwritten;
/// assignments with kept = 0 are left out (`kept` may be empty), and the tokens from `token_count` on
/// (may be empty). `topk` holds expert numbers below `experts`, which is checked on the device, or -1
/// for what is left out. Not for dry streams.
ExpertSort sort_by_expert(CudaContext& context,
                          TensorView rank,
                          TensorView offsets,
                          TensorView scratch,
                          const ConstTensorView& topk,
                          const ConstTensorView& kept,
                          const ConstTensorView& token_count = {});

}  // namespace moesaic::cuda
