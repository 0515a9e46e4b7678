#pragma once
// Which keys a query sees: those of its document up to its own position and, with a selection, those selected.
#include <cstdint>

#include "kernels/cuda/launch.h"

namespace moesaic::cuda {

/// First key of the document that position p lies in: 0 = cu[0] <= … <= cu[n].
__device__ __forceinline__ std::int32_t document_begin(const std::int32_t* cu,
                                                       std::int64_t documents,
                                                       std::int64_t p) {
  std::int64_t low = 0, high = documents;  // cu[low] <= p < cu[high]
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (cu[middle] <= p ? low : high) = middle;
  }
  return cu[low];
}

/// Queries [Tq] that stand at the last Tq of Tk positions. `begins` [Tq] ascends.
struct QueryKeys {
  std::int64_t queries = 0, keys = 0;
  const std::int32_t* begins = nullptr;
  __device__ __forceinline__ std::int64_t position(std::int64_t t) const {
    return keys - queries + t;
  }
  __device__ __forceinline__ std::int64_t visible(std::int64_t t) const {
    return position(t) + 1 - begins[t];
  }
};

/// A selection as bits: words [rows, words_per_row], bit s % 32 of word s / 32 = key s; rows start at query `first`.
struct SelectionWords {
  const std::uint32_t* words = nullptr;  ///< null: every visible key
  std::int64_t first = 0, per_row = 0;
  __device__ __forceinline__ bool holds(std::int64_t t, std::int64_t s) const {
    return words == nullptr || (words[(t - first) * per_row + s / 32] >> (s % 32) & 1U) != 0;
  }
};

/// Fills `begins` [Tq] i32 (scratch).
void launch_document_begins(const CudaContext& context,
                            TensorView begins,
                            const ConstTensorView& cu_seqlens,
                            std::int64_t keys);
/// Fills the words [rows, per_row] i32 (scratch) of queries [first, first + rows). Entries that a query does not see are
/// left out.
void launch_selection_words(const CudaContext& context,
                            TensorView words,
                            const ConstTensorView& selected,
                            const QueryKeys& see,
                            std::int64_t first,
                            std::int64_t rows);

}  // namespace moesaic::cuda
