#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "kernels/ops/op.h"

namespace moesaic::apps {

/// Counts which kernel the ops that have several of them took.
class PathLog : public PathObserver {
 public:
  void ran(const char* op, const char* path) override { ++counts_[{op, path}]; }
  void clear() { counts_.clear(); }
  void add(const PathLog& other);
  bool empty() const noexcept { return counts_.empty(); }
  /// Times by (op, path).
  const std::map<std::pair<std::string, std::string>, std::int64_t>& counts() const noexcept {
    return counts_;
  }
  /// "attention_forward tiled, gemm plain": every pair once.
  std::string text() const;
  /// Paths of one op: "tiled", "plain, tiled"; "" when it has one kernel only.
  std::string of(const std::string& op) const;

 private:
  std::map<std::pair<std::string, std::string>, std::int64_t> counts_;
};

}  // namespace moesaic::apps
