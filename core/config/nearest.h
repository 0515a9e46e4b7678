#pragma once
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace moesaic::config {

/// Smallest number of insertions, deletions, replacements and swaps of neighbours that turn `a`
/// into `b`.
std::size_t edit_distance(std::string_view a, std::string_view b);

/// The word nearest to `word`, or "" if none is near enough to be meant.
std::string nearest(std::string_view word, const std::vector<std::string>& words);

}  // namespace moesaic::config
