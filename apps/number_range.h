#pragma once
#include <cmath>
#include <cstdlib>
#include <string>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

namespace moesaic::apps {

/// A number from `least` to `most`; unlike CLI::Range it does not let NaN through.
inline CLI::Validator number_in(double least, double most) {
  return CLI::Validator(
      [=](const std::string& text) -> std::string {
        char* end = nullptr;
        const double number = std::strtod(text.c_str(), &end);
        const bool is_number = end != text.c_str() && *end == '\0';
        if (is_number && number >= least && number <= most) return "";
        return fmt::format("{} is not a number from {} to {}", text, least, most);
      },
      fmt::format("FLOAT in [{} - {}]", least, most));
}

}  // namespace moesaic::apps
