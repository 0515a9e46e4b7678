#pragma once
#include <optional>
#include <string>
#include <vector>

#include "parallel/pipeline/schedule.h"

namespace moesaic::pipeline {

/// Ceilings that a schedule must keep.
struct Limits {
  /// Micro-batches of a chunk between forward and the end of backward; none = no ceiling.
  std::optional<int> in_flight;
};

/// Everything that is wrong with a schedule, whoever wrote it, a line each naming rank and action; empty when it can run:
///
///  - each rank passes each micro-batch once through each of its chunks: forward, then backward whole or in two parts;
///  - the bundle that an action needs was made on the rank or received before, and every bundle is sent once, after it
///    was made, to the rank that needs it;
///  - between two ranks, the k-th receive is for what the k-th send carries;
///  - no deadlock when every send waits for its receive and a rank waits for each exchange to end before it goes on.
///    Messages of one exchange do not wait for each other. For a deadlock the line names the circle: each rank, the action
///    that it is in, and whom it waits for;
///  - the limits.
///
/// Later checks are left out where an earlier one makes them meaningless.
std::vector<std::string> problems(const Schedule& schedule, const Limits& limits = {});

/// Throws InternalError with the problems().
void validate(const Schedule& schedule);

}  // namespace moesaic::pipeline
