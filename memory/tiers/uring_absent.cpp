#include "memory/tiers/io_queue.h"

namespace moesaic::tiers {

OpenedQueue try_uring_queue(int, const std::vector<Memory>&) {
  return {nullptr,
          {"this moesaic was built without liburing; install liburing-dev and build with "
           "-DMOESAIC_URING=ON for io_uring"}};
}

}  // namespace moesaic::tiers
