#pragma once
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "core/config/problem.h"

namespace moesaic::config {

/// Where a piece of configuration text stands. `line` and `column` count from 1; 0 = no position
/// (command line).
struct Position {
  std::string file;
  int line = 0;
  int column = 0;
};

/// `file` of everything that came from an `a.b=c` argument.
inline constexpr const char* kCommandLine = "command line";

/// A YAML value with its position. Owns everything; knows nothing of types: scalars are text.
struct Node {
  enum class Kind { null, scalar, list, map };

  Kind kind = Kind::null;
  std::string text;     ///< scalars: the value after unquoting
  bool quoted = false;  ///< scalars: written in quotes or as a block, so never a number or a bool
  Position at;          ///< of the value
  std::string key;      ///< of an entry of a map
  Position key_at;      ///< of that key
  std::vector<Node>
      children;  ///< list items or map entries, in file order; keys of a map are distinct

  /// The entry with this key, or nullptr.
  const Node* find(std::string_view name) const;
  Node* find(std::string_view name);

  /// Position to blame for this value: its own, or that of its key where the value is absent.
  const Position& blame() const { return kind == Kind::null && key_at.line > 0 ? key_at : at; }
};

inline constexpr std::size_t kMaxYamlBytes = std::size_t{1} << 20;
inline constexpr std::size_t kMaxYamlDepth = 32;
inline constexpr std::size_t kMaxYamlEntries = 1024;  ///< of one map
inline constexpr std::size_t kMaxYamlValues = 32768;  ///< of one text

/// Parses one YAML document. Text that is too large (1 MiB), too deep (32), has too many values,
/// not UTF-8, indented by tabs, or that uses anchors, aliases, tags, complex keys, duplicate keys
/// or a second document is a problem, appended to `problems`. Returns what could be read; an empty
/// document is a node of kind null.
Node parse_yaml(std::string_view text, const std::string& file, std::vector<Problem>& problems);

/// `parse_yaml` of a file's content; a file that cannot be read is a problem too.
Node parse_yaml_file(const std::string& path, std::vector<Problem>& problems);

/// Lays `over` on `under`: maps entry by entry, everything else (null included) replaces.
void merge(Node& under, Node over);

}  // namespace moesaic::config
