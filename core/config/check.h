#pragma once
#include <string>
#include <vector>

#include "core/config/config.h"
#include "core/config/problem.h"

namespace moesaic::config {

/// A rule over several keys that a configuration breaks. The first key is the one to blame.
struct Finding {
  std::vector<std::string> keys;
  std::string message;
};

/// All broken rules between keys, in the order of the sections. `load_config` runs them and adds
/// positions.
std::vector<Finding> findings(const Config& config);

/// The same as problems without positions, for a configuration that a program built.
std::vector<Problem> check(const Config& config);

/// What a valid configuration asks for that can be planned but not trained.
std::vector<Problem> untrainable(const Config& config);

}  // namespace moesaic::config
