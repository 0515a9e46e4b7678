#pragma once
// The local sum of an ordered reduction.
#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "comm/communicator.h"

namespace moesaic::cuda {

/// What the ranks sent: rank p's elements start at `parts` + p `count` elements; those of `rank`, which are not sent, at
/// `own`.
struct RankParts {
  const std::byte* parts = nullptr;
  const std::byte* own = nullptr;
  int rank = 0;
  int size = 1;
  std::int64_t count = 0;
};

/// out[i] = parts of rank 0, 1, … combined left to right in the accumulation type, as combine_in_order() does on the
/// host; the same bits. `out` may be `own`.
void combine_in_order(
    std::byte* out, const RankParts& in, DType dtype, ReduceOp op, cudaStream_t stream);

}  // namespace moesaic::cuda
