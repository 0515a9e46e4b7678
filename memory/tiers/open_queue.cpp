#include <fmt/format.h>

#include "core/base/error.h"
#include "memory/tiers/io_queue.h"

namespace moesaic::tiers {

OpenedQueue open_io_queue(IoKind kind, int depth, const std::vector<Memory>& fixed) {
  MOESAIC_CHECK(depth > 0 && depth <= 4096, "a queue of 1 to 4096 requests");
  if (kind == IoKind::threads) return {make_thread_queue(depth), {}};
  OpenedQueue opened = try_uring_queue(depth, fixed);
  if (opened.queue) return opened;
  const std::string reason = opened.notes.empty() ? "" : opened.notes.front();
  if (kind == IoKind::uring) throw ResourceError("io_uring was asked for, but " + reason);
  opened.queue = make_thread_queue(depth);
  opened.notes = {fmt::format("reads and writes through {} threads: {}", depth, reason)};
  return opened;
}

}  // namespace moesaic::tiers
