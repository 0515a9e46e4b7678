#pragma once
#include <map>
#include <string>
#include <vector>

#include "kernels/ops/op.h"

namespace moesaic::bench {

/// Adds up time and work per op name: processor time on the CPU, the device's own time on a GPU. Read it only while the
/// observed stream is idle.
class OpProfile : public OpObserver {
 public:
  /// The stream of the observed backend.
  explicit OpProfile(Stream& stream) : stream_(stream) {}
  struct Entry {
    std::string op;
    std::int64_t calls = 0;
    double seconds = 0;
    OpCost cost;
  };
  void begin(const char* op) override;
  void end(const char* op, const OpCost& cost) override;
  void clear() { entries_.clear(); }
  /// Adds what a GPU has measured since the last call; call it after every step, with the stream idle.
  void collect();
  /// Slowest first.
  std::vector<Entry> sorted() const;

 private:
  struct Span {
    std::string op;
    OpCost cost;
    Timestamp from, to;
  };
  bool on_gpu() const { return stream_.device().kind == Device::Kind::cuda; }
  void add(const std::string& op, double seconds, const OpCost& cost);

  Stream& stream_;
  std::map<std::string, Entry> entries_;
  std::vector<Span> spans_;  // the first used_ of them are of this step
  std::size_t used_ = 0;
  double start_ = 0;
};

}  // namespace moesaic::bench
