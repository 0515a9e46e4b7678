#pragma once
#include <string>

#include "parallel/pipeline/schedule.h"

namespace moesaic::pipeline {

/// Runs the lists with exchanges that end when the partners of all their messages have been posted. Empty when every
/// rank gets to its end; else the circle of ranks that wait for each other, with the actions that they are in. Sends and
/// receives must match.
std::string find_deadlock(const Schedule& schedule);

}  // namespace moesaic::pipeline
