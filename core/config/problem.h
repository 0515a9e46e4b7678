#pragma once
#include <string>
#include <vector>

#include "core/base/error.h"

namespace moesaic::config {

/// One thing that is wrong with a configuration.
struct Problem {
  std::string file;     ///< path as the user gave it, or "command line"
  int line = 0;         ///< from 1; 0 = no position inside `file`
  int column = 0;       ///< from 1
  std::string key;      ///< full key, such as `train.phases[1].until`; empty = the whole file
  std::string message;  ///< value found, what is allowed, what to do
  bool operator==(const Problem&) const = default;
};

/// "file:line:column key: message", without the parts that are absent.
std::string to_string(const Problem& problem);

/// All problems of a configuration in one exception (exit 2). `what()` has one line per problem and
/// a closing count.
class ConfigError : public UsageError {
 public:
  explicit ConfigError(std::vector<Problem> problems);
  const std::vector<Problem>& problems() const noexcept { return problems_; }

 private:
  std::vector<Problem> problems_;
};

}  // namespace moesaic::config
