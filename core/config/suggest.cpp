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
  const std::vector<std::string> elsewhere = keys_named(key);
  if (!elsewhere.empty() && elsewhere.size() <= 3) {
    return fmt::format("unknown key; did you mean {}?", fmt::join(elsewhere, " or "));
  }
  const std::vector<std::string> here = keys_of(section);
  if (const std::string near = nearest(key, here); !near.empty()) {
    return fmt::format("unknown key; did you mean {}?", full_key(path, near));
  }
  if (here.size() <= 16) return fmt::format("unknown key; known here: {}", fmt::join(here, ", "));
  return fmt::format("unknown key; 'moesaic explain {}' lists the keys", path);
}

}  // namespace moesaic::config
