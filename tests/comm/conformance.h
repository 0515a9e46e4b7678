#pragma once
// One suite for every Communicator. A case runs on all ranks of a group at once and throws on the
// first wrong result (Catch2's macros may not be used from several threads).
#include <span>

#include "comm/communicator.h"

namespace moesaic::test {

struct ConformanceCase {
  const char* name;
  void (*body)(Communicator&, Device);  ///< the device whose memory the communicator moves
  bool host_only = false;               ///< puts host tasks on a stream
};
std::span<const ConformanceCase> conformance_cases();

/// Messages beyond 2 GiB, on groups of two ranks: 2.2 GiB of memory per rank, and a minute.
std::span<const ConformanceCase> large_cases();

}  // namespace moesaic::test
