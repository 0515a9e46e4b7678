#pragma once
#include <string>
#include <utility>
#include <vector>

namespace moesaic::apps {

/// A key whose value differs between two configurations, as effective_yaml() prints them.
struct ConfigChange {
  std::string key;            ///< "optimizer.lr", "train.phases[1].until"
  std::string before, after;  ///< "absent" where a side has no such key
};

/// Every key with its value, as effective_yaml() prints them, in its order.
std::vector<std::pair<std::string, std::string>> config_values(const std::string& yaml);

/// All differences, in the order of the new text. A key that is absent and one that is null have the same value.
std::vector<ConfigChange> config_changes(const std::string& before_yaml,
                                         const std::string& after_yaml);

}  // namespace moesaic::apps
