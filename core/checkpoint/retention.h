#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace moesaic {

/// Which of the complete checkpoints `steps` (any order) may be deleted after `saved` has been
/// written, ascending. Kept: `saved`; the `keep_last` newest (0: all); multiples of `keep_every`
/// (0: no such rule).
std::vector<std::int64_t> steps_to_delete(std::span<const std::int64_t> steps,
                                          std::int64_t saved,
                                          std::int64_t keep_last,
                                          std::int64_t keep_every);

}  // namespace moesaic
