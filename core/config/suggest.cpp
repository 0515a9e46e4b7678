#include "core/config/suggest.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/config/nearest.h"

namespace moesaic::config {
namespace {

bool knows(const Field& field, std::string_view name) {
  return std::find(field.other_names.begin(), field.other_names.end(), name) !=
         field.other_names.end();
}

std::string full_key(const std::string& path, const std::string& key) {
  return path.empty() ? key : path + "." + key;
}

std::vector<std::string> keys_of(const Section& section) {
  std::vector<std::string> keys;
  for (const Field& field : section.fields)
    keys.push_back(field.key);
  return keys;
}

}  // namespace

std::vector<std::string> keys_named(std::string_view name) {
  std::vector<std::string> found;
  walk(root_section(), "", [&](const std::string& key, const Field& field) {
    if (field.key == name || knows(field, name)) found.push_back(key);
  });
  return found;
}

std::string unknown_key_message(const Section& section,
                                const std::string& path,
                                const std::string& key) {
  if (key == "<<") return "merge keys are not accepted; share settings through 'base: FILE'";
  for (const Field& field : section.fields) {
    if (knows(field, key))
      return fmt::format("unknown key; it is called {} here", full_key(path, field.key));
  }
  std::vector<std::string> elsewhere = keys_named(key);
  const bool is_section = std::erase(elsewhere, key) > 0 && !path.empty();
  if (!elsewhere.empty() && elsewhere.size() <= 3) {
    return fmt::format("unknown key; did you mean {}?", fmt::join(elsewhere, " or "));
  }
  const std::vector<std::string> here = keys_of(section);
  if (const std::string near = nearest(key, here); !near.empty()) {
    return fmt::format("unknown key; did you mean {}?", full_key(path, near));
  }
  const std::string what = is_section
                               ? fmt::format("unknown key ({} is a section of its own, beside {})",
                                             key,
                                             path.substr(0, path.find_first_of(".[")))
                               : "unknown key";
  if (here.size() <= 16) return fmt::format("{}; known here: {}", what, fmt::join(here, ", "));
  return fmt::format("{}; 'moesaic explain {}' lists the keys", what, path);
}

}  // namespace moesaic::config
