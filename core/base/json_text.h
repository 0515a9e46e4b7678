#pragma once
#include <cstddef>
#include <optional>
#include <string_view>

namespace moesaic {

/// Where a text that is to be parsed as JSON holds a zero byte. JSON has none, but nlohmann's parser takes one for the end of its
/// input: whatever stands behind it would be passed over in silence. Every parser of foreign JSON refuses such a text first.
constexpr std::optional<std::size_t> zero_byte_in(std::string_view text) noexcept {
  const auto at = text.find('\0');
  if (at == std::string_view::npos) return std::nullopt;
  return at;
}

}  // namespace moesaic
