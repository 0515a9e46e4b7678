#pragma once
#include <map>
#include <string>

namespace moesaic::config {

/// Where a value of the effective configuration comes from.
struct Origin {
  enum class Source { preset, file, command_line };
  Source source = Source::preset;
  std::string file;
  int line = 0;
  int column = 0;
};

/// "default", "file:line:column" or "command line".
std::string to_string(const Origin& origin);

/// By full key (`train.phases[1].until`; sections too). A key that is absent has its default.
using Origins = std::map<std::string, Origin>;

}  // namespace moesaic::config
