#include "apps/config_changes.h"

#include <map>
#include <sstream>
#include <utility>

namespace moesaic::apps {
namespace {

constexpr const char* kNull = "null";

}  // namespace

// Only what effective_yaml() writes has to be read: block mappings, lists of mappings, one value per line, an origin in a
// comment at the end.
std::vector<std::pair<std::string, std::string>> config_values(const std::string& yaml) {
  struct Level {
    std::size_t indent;
    std::string key;
    int items = 0;
  };
  std::vector<std::pair<std::string, std::string>> values;
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
    const auto start = line.find_first_not_of(' ', colon + 1);
    if (start == std::string::npos) continue;
    std::string key;
    for (const Level& level : levels)
      key += (key.empty() || level.key[0] == '[' ? "" : ".") + level.key;
    values.emplace_back(key, line.substr(start));
  }
  return values;
}

std::vector<ConfigChange> config_changes(const std::string& before_yaml,
                                         const std::string& after_yaml) {
  const auto before = config_values(before_yaml), after = config_values(after_yaml);
  std::map<std::string, std::string> old(before.begin(), before.end());
  std::vector<ConfigChange> changes;
  for (const auto& [key, value] : after) {
    const auto it = old.find(key);
    if (it == old.end()) {
      if (value != kNull) changes.push_back({key, "absent", value});
    } else if (it->second != value) {
      changes.push_back({key, it->second, value});
    }
    if (it != old.end()) old.erase(it);
  }
  for (const auto& [key, value] : before) {
    if (old.count(key) != 0 && value != kNull) changes.push_back({key, value, "absent"});
  }
  return changes;
}

}  // namespace moesaic::apps
