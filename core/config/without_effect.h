#pragma once
#include <vector>

#include "core/config/check.h"

namespace moesaic::config {

/// Keys with another value than their default that do nothing as the others are, first in `keys`; the message says what would
/// make them count. No mistakes: parts of a run are turned off and on to compare.
std::vector<Finding> without_effect(const Config& config);

}  // namespace moesaic::config
