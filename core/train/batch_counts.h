#pragma once
#include <cstdint>

#include "comm/communicator.h"

namespace moesaic {

/// What losses of a step are divided by, and whether anybody wants to stop before it.
struct BatchCounts {
  std::int64_t valid_targets = 0;
  std::int64_t mtp_targets = 0;
  std::int64_t documents = 0;
  std::int64_t tokens = 0;
  std::int64_t stop_wish = 0;  ///< 0: go on
};

/// Counts summed over all ranks and the highest wish, equal on all ranks, in one exchange. `world` null: one rank.
BatchCounts over_ranks(const BatchCounts& own, Communicator* world);

}  // namespace moesaic
