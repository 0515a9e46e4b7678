#include "core/config/suggest.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

namespace moesaic::config {
namespace {

bool knows(const Field& field, std::string_view name) {
  return std::find(field.other_names.begin(), field.other_names.end(), name) != field.other_names.end();
}

std::string full_key(const std::string& path, const std::string& key) { return path.empty() ? key : path + "." + key; }

std::vector<std::string> keys_of(const Section& section) {
  std::vector<std::string> keys;
  for (const Field& field : section.fields) keys.push_back(field.key);
  return keys;
}

}  // namespace

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before, above(b.size() + 1), row(b.size() + 1);
  std::iota(above.begin(), above.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] != b[j - 1])});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before = above;
    above = row;
  }
  return above[b.size()];
}

std::string nearest(std::string_view word, const std::vector<std::string>& words) {
  // One slip per three letters is still recognisable; a long stranger is not worth the quadratic comparison.
  const std::size_t limit = std::min<std::size_t>(3, std::max<std::size_t>(1, word.size() / 3));
  std::string best;
  std::size_t best_distance = limit + 1;
  if (word.size() > 64) return best;
  for (const std::string& candidate : words) {
    const std::size_t distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

std::vector<std::string> keys_named(std::string_view name) {
  std::vector<std::string> found;
  walk(root_section(), "", [&](const std::string& key, const Field& field) {
    if (field.key == name || knows(field, name)) found.push_back(key);
  });
  return found;
}

std::string unknown_key_message(const Section& section, const std::string& path, const std::string& key) {
  if (key == "<<") return "merge keys are not accepted; share settings through 'base: FILE'";
  for (const Field& field : section.fields) {
    if (knows(field, key)) return fmt::format("unknown key; it is called {} here", full_key(path, field.key));
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
