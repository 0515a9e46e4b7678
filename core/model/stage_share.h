#pragma once
#include <algorithm>
#include <vector>

#include "parallel/pipeline/partition.h"

namespace moesaic {

/// What one pipeline stage holds of a model.
struct StageShare {
  struct Chunk {
    pipeline::LayerRange layers;
    bool is_first = false, is_last = false;  ///< of all chunks of the model
  };
  std::vector<Chunk> chunks;  ///< in the order of the model; none: the whole model
  /// Micro-batches pass chunk by chunk, all of them (parallel.order: vertical).
  bool is_vertical = false;

  bool has_first() const { return chunks.empty() || chunks.front().is_first; }
  bool has_last() const { return chunks.empty() || chunks.back().is_last; }
};

}  // namespace moesaic
