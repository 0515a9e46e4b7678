#pragma once
#include <map>
#include <string>
#include <vector>

#include "kernels/ops/op.h"

namespace moesaic::bench {

/// Adds up processor time and work per op name. Read it only while the observed stream is idle.
class OpProfile : public OpObserver {
 public:
  struct Entry {
    std::string op;
    std::int64_t calls = 0;
    double seconds = 0;
    OpCost cost;
  };
  void begin(const char* op) override;
  void end(const char* op, const OpCost& cost) override;
  void clear() { entries_.clear(); }
  /// Slowest first.
  std::vector<Entry> sorted() const;

 private:
  std::map<std::string, Entry> entries_;
  double start_ = 0;
};

}  // namespace moesaic::bench
