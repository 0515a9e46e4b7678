#include "apps/whole_number.h"

#include <charconv>
#include <cstdint>

#include <fmt/format.h>

namespace moesaic::apps {

std::string whole_number(const std::string& text) {
  std::int64_t n = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, n);
  if (parsed.ec == std::errc() && parsed.ptr == end && n >= 0) return "";
  return fmt::format("found {}; allowed: a whole number, at least 0", text);
}

}  // namespace moesaic::apps
