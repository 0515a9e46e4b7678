#pragma once
#include <map>
#include <string>
#include <vector>

#include "core/config/fields.h"
#include "core/config/node.h"
#include "core/config/origin.h"
#include "core/config/problem.h"

namespace moesaic::config {

/// Fills section structs from a node tree, strictly: everything that does not fit the field list
/// becomes a problem, and reading goes on.
class Reader {
 public:
  /// `origins`: receives the position of each key that is set, groups included; may be nullptr.
  /// `complete`: missing required keys are problems.
  Reader(std::vector<Problem>& problems, Origins* origins, bool complete)
      : problems_(problems), origins_(origins), complete_(complete) {}

  /// Reads a map into the struct at `out`; `path` is the section's full name ("" = top).
  void section(const Section& section, const Node& node, const std::string& path, void* out);

 private:
  void missing_keys(const Section& section, const Node& node, const std::string& path, void* out);
  void entry(const Field& field, const Node& node, const std::string& path, void* out);
  void value(
      const Field& field, const Type& type, const Node& node, const std::string& path, void* out);
  void scalar(
      const Field& field, const Type& type, const Node& node, const std::string& path, void* out);
  void integer(const Field& field, const Node& node, const std::string& path, void* out);
  void number(const Field& field, const Node& node, const std::string& path, void* out);
  void choice(
      const Field& field, const Type& type, const Node& node, const std::string& path, void* out);
  void list(
      const Field& field, const Type& type, const Node& node, const std::string& path, void* out);
  void remember(const Node& node, const std::string& path);
  void problem(const Position& at, const std::string& path, std::string message);
  void wrong(const Field& field,
             const Type& type,
             const Node& node,
             const std::string& path,
             const std::string& why);

  std::vector<Problem>& problems_;
  Origins* origins_;
  bool complete_;
  const Section* current_ = nullptr;  ///< section whose entries are being read
};

}  // namespace moesaic::config
