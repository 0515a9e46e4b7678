#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "comm/communicator.h"

namespace moesaic::bench {

/// All ranks sending random bytes to all their peers at once.
struct RawExchange {
  std::int64_t bytes = 0;   ///< to each peer
  double seconds = 0;       ///< of one exchange, of the slowest rank
  double bytes_per_second;  ///< that a rank sends, to all peers together
};

/// Times exchanges of so many MiB with every peer, the bare transport below what dispatch does: medians of `repeats` rounds of
/// several exchanges each, by the stream's clock. Checks what arrived; a difference is an InternalError. Needs twice the bytes of
/// all peers on the device. `host`: the same ranks, for host values. The same result on all ranks.
std::vector<RawExchange> time_raw_exchanges(Communicator& group,
                                            Communicator& host,
                                            Device device,
                                            std::span<const std::int64_t> mib,
                                            int repeats,
                                            std::uint64_t seed);

}  // namespace moesaic::bench
