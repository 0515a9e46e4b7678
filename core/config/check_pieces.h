#pragma once
#include <vector>

#include "core/config/check.h"

namespace moesaic::config {

/// Adds the broken rules between activations.piece_tokens and other keys; part of findings().
void add_piece_findings(const Config& config, std::vector<Finding>& findings);

}  // namespace moesaic::config
