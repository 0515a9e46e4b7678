#include "apps/bench/op_profile.h"

#include <algorithm>

#include "apps/bench/timing.h"

namespace moesaic::bench {

void OpProfile::begin(const char*) {
  start_ = processor_seconds_now();
}

void OpProfile::end(const char* op, const OpCost& cost) {
  const double seconds = processor_seconds_now() - start_;
  Entry& entry = entries_[op];
  ++entry.calls;
  entry.seconds += seconds;
  entry.cost.flops += cost.flops;
  entry.cost.bytes += cost.bytes;
}

std::vector<OpProfile::Entry> OpProfile::sorted() const {
  std::vector<Entry> all;
  for (const auto& [name, entry] : entries_) {
    all.push_back(entry);
    all.back().op = name;
  }
  std::sort(
      all.begin(), all.end(), [](const Entry& a, const Entry& b) { return a.seconds > b.seconds; });
  return all;
}

}  // namespace moesaic::bench
