#include "apps/config_changes.h"

#include <map>
#include <sstream>
#include <utility>

namespace moesaic::apps {
namespace {

using Flat = std::vector<std::pair<std::string, std::string>>;

// Only what effective_yaml() writes has to be read: block mappings, lists of mappings, one value per line, an origin in a
// comment at the end.
Flat flatten(const std::string& yaml) {
  struct Level {
    std::size_t indent;
    std::string key;
    int items = 0;
  };
  Flat flat;
  std::vector<Level> levels;
  std::istringstream lines(yaml);
  for (std::string line; std::getline(lines, line);) {
    if (const auto comment = line.rfind("  # "); comment != std::string::npos) line.resize(comment);
    std::size_t indent = line.find_first_not_of(' ');
    if (indent == std::string::npos) continue;
    while (!levels.empty() && levels.back().indent >= indent)
      levels.pop_back();
    if (line.compare(indent, 2, "- ") == 0) {
      const int item = levels.empty() ? 0 : levels.back().items++;
      levels.push_back({indent, "[" + std::to_string(item) + "]"});
      indent += 2;
    }
    if (line.compare(indent, 2, "# ") == 0) continue;  // follows from other keys
    const auto colon = line.find(':', indent);
    if (colon == std::string::npos) continue;
    levels.push_back({indent, line.substr(indent, colon - indent)});
    const auto value = line.find_first_not_of(' ', colon + 1);
    if (value == std::string::npos) continue;
    std::string key;
    for (const Level& level : levels)
      key += (key.empty() || level.key[0] == '[' ? "" : ".") + level.key;
    flat.emplace_back(key, line.substr(value));
  }
  return flat;
}

}  // namespace

std::vector<ConfigChange> config_changes(const std::string& before_yaml,
                                         const std::string& after_yaml) {
  const Flat before = flatten(before_yaml), after = flatten(after_yaml);
  std::map<std::string, std::string> old(before.begin(), before.end());
  std::vector<ConfigChange> changes;
  for (const auto& [key, value] : after) {
    const auto it = old.find(key);
    if (it == old.end()) {
      changes.push_back({key, "absent", value});
    } else if (it->second != value) {
      changes.push_back({key, it->second, value});
    }
    if (it != old.end()) old.erase(it);
  }
  for (const auto& [key, value] : before) {
    if (old.count(key) != 0) changes.push_back({key, value, "absent"});
  }
  return changes;
}

}  // namespace moesaic::apps
