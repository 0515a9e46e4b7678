#pragma once
#include <algorithm>
#include <cstdint>

#include "core/base/tensor.h"

namespace moesaic {

/// How a tensor that is no member of a family falls into equal runs of rows, by its shape alone: state is
/// cut between them (StateSharding), and the norm of the gradients has a partial sum for each of them, so that its bits do
/// not depend on the cuts. About 64 of a tensor, more where they would exceed 256 Ki elements; never less than a row.
struct RowBlocks {
  /// `extent`: of what a rank holds of the tensor.
  explicit RowBlocks(const Shape& extent) : elements(extent.numel()) {
    if (extent.rank < 2 || elements == 0) return;
    const std::int64_t rows = extent[0], row = elements / rows;
    std::int64_t each =
        std::max<std::int64_t>(1, std::min(kMostElements / row, rows / kLeastCount));
    while (rows % each != 0)
      --each;
    count = rows / each;
    elements = each * row;
  }

  std::int64_t count = 1;
  std::int64_t elements;  ///< of each

 private:
  static constexpr std::int64_t kLeastCount = 64, kMostElements = std::int64_t{1} << 18;
};

}  // namespace moesaic
