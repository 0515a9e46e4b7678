#pragma once
#include <string>

#include "parallel/pipeline/schedule.h"

namespace moesaic::pipeline {

/// Runs the lists with exchanges as Communicator::exchange() promises them: with each peer the first message out and the first
/// one in, when the partners of both have been posted, then the second ones, and so on. Empty when every rank gets to its end; else the circle of ranks that wait for each other, with the actions that they are in. Sends and
/// receives must match.
std::string find_deadlock(const Schedule& schedule);

}  // namespace moesaic::pipeline
