#pragma once
#include <vector>

#include "core/config/check.h"

namespace moesaic::config {

/// Adds the broken rules between the keys of `experts`, `memory` and others; part of findings().
void add_offload_findings(const Config& config, std::vector<Finding>& findings);

}  // namespace moesaic::config
