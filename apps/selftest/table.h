#pragma once
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "apps/path_log.h"
#include "apps/selftest/comparison.h"
#include "apps/selftest/layouts.h"

namespace moesaic::apps::selftest {

/// How one layout compares with one rank.
struct Row {
  Layout layout;
  Difference difference;
  std::int64_t choices = 0, differing = 0, moved = 0, replicas = 0;
  double seconds = 0;
  bool agrees = false;
  PathLog kernels;  ///< of the first rank
};

/// Prints rows as they come, and what they came to.
class Table {
 public:
  struct Options {
    int steps = 0;
    DType compute = DType::f64;
    std::string where;  ///< "the CPU"
    DifferenceBounds bounds;
    bool json = false;
  };
  /// `out` must outlive it.
  Table(Options options, std::ostream& out) : options_(std::move(options)), out_(out) {}

  void begin(std::size_t layouts);
  void one_rank_took(const PathLog& kernels) { of_one_rank_ = kernels; }
  void add(const Row& row);
  /// Returns the exit code.
  int finish();

 private:
  bool replays() const { return options_.compute != DType::f64; }
  void print_json();
  void print_kernels();

  Options options_;
  std::ostream& out_;
  std::vector<Row> rows_;
  PathLog of_one_rank_;
  std::size_t failed_ = 0;
};

}  // namespace moesaic::apps::selftest
