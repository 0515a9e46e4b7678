#include "apps/number_range.h"

#include <cstdlib>

#include <fmt/format.h>

namespace moesaic::apps {

std::function<std::string(const std::string&)> number_in(double least, double most) {
  return [=](const std::string& text) -> std::string {
    char* end = nullptr;
    const double number = std::strtod(text.c_str(), &end);
    const bool is_number = end != text.c_str() && *end == '\0';
    if (is_number && number >= least && number <= most) return "";
    return fmt::format("{} is not a number from {} to {}", text, least, most);
  };
}

}  // namespace moesaic::apps
