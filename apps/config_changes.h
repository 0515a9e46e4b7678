#pragma once
#include <string>
#include <vector>

namespace moesaic::apps {

/// A key whose value differs between two configurations, as effective_yaml() prints them.
struct ConfigChange {
  std::string key;            ///< "optimizer.lr", "train.phases[1].until"
  std::string before, after;  ///< "absent" where a side has no such key
};

/// All differences, in the order of the new text.
std::vector<ConfigChange> config_changes(const std::string& before_yaml,
                                         const std::string& after_yaml);

}  // namespace moesaic::apps
