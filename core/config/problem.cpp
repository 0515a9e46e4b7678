#include "core/config/problem.h"

#include <cstddef>
#include <utility>

#include <fmt/format.h>

namespace moesaic::config {

std::string to_string(const Problem& problem) {
  std::string text = problem.file;
  if (problem.line > 0) text += fmt::format(":{}:{}", problem.line, problem.column);
  // Without a position a space would glue "command line" to the key.
  if (problem.line == 0) text += ":";
  if (!problem.key.empty()) text += " " + problem.key + ":";
  return text + " " + problem.message;
}

namespace {

/// A file of another kind can have a problem in every line; nobody reads more than these.
constexpr std::size_t kShown = 200;

std::string all_lines(const std::vector<Problem>& problems) {
  std::string text;
  for (std::size_t i = 0; i < problems.size() && i < kShown; ++i) {
    text += to_string(problems[i]) + "\n";
  }
  if (problems.size() > kShown) text += fmt::format("… and {} more\n", problems.size() - kShown);
  return text + fmt::format("{} problem{} in the configuration; nothing was started",
                            problems.size(),
                            problems.size() == 1 ? "" : "s");
}

}  // namespace

ConfigError::ConfigError(std::vector<Problem> problems)
    : UsageError(all_lines(problems)), problems_(std::move(problems)) {}

}  // namespace moesaic::config
