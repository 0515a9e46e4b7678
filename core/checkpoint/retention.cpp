#include "core/checkpoint/retention.h"

#include <algorithm>

#include "core/base/error.h"

namespace moesaic {

std::vector<std::int64_t> steps_to_delete(std::span<const std::int64_t> steps,
                                          std::int64_t saved,
                                          std::int64_t keep_last,
                                          std::int64_t keep_every) {
  MOESAIC_CHECK(keep_last >= 0 && keep_every >= 0, "negative retention rule");
  std::vector<std::int64_t> old(steps.begin(), steps.end());
  if (keep_last == 0 || static_cast<std::int64_t>(old.size()) <= keep_last) return {};
  std::sort(old.begin(), old.end());
  old.resize(old.size() - static_cast<std::size_t>(keep_last));
  std::erase_if(old, [&](std::int64_t step) {
    return step == saved || (keep_every > 0 && step % keep_every == 0);
  });
  return old;
}

}  // namespace moesaic
