#include "apps/bench/op_profile.h"

#include <algorithm>

#include "apps/bench/timing.h"

namespace moesaic::bench {

void OpProfile::begin(const char* op) {
  if (!on_gpu()) {
    start_ = processor_seconds_now();
    return;
  }
  if (used_ == spans_.size())
    spans_.push_back({op, {}, Timestamp(stream_.device()), Timestamp(stream_.device())});
  spans_[used_].op = op;
  stream_.record(spans_[used_].from);
}

void OpProfile::end(const char* op, const OpCost& cost) {
  if (!on_gpu()) return add(op, processor_seconds_now() - start_, cost);
  spans_[used_].cost = cost;
  stream_.record(spans_[used_].to);
  ++used_;
}

void OpProfile::collect() {
  for (std::size_t i = 0; i < used_; ++i)
    add(spans_[i].op, seconds_between(spans_[i].from, spans_[i].to), spans_[i].cost);
  used_ = 0;
}

void OpProfile::add(const std::string& op, double seconds, const OpCost& cost) {
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
