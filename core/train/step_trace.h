#pragma once
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "kernels/part_scope.h"

namespace moesaic {

/// Records when every op and part of one step ran, on the clock of its device, and writes them as Chrome trace events.
/// Observe from before the step to after it (Trainer::observe, observe_paths), then write().
class StepTrace : public PartObserver, public PathObserver {
 public:
  /// The stream of the observed backend. Time 0 is now.
  explicit StepTrace(Stream& stream);

  void begin(const char* op) override;
  void end(const char* op, const OpCost& cost) override;
  void push(const std::string& part) override;
  void pop() override;
  void ran(const char* op, const char* path) override;

  /// JSON with one complete event ("ph": "X") per op and part: ts and dur in microseconds, the rank as pid; ops have flops,
  /// bytes and, on a GPU, the kernel's path as args. The stream must be idle. Throws ResourceError.
  void write(const std::string& path, int rank) const;

 private:
  struct Point {
    double seconds = 0;                 // CPU
    std::unique_ptr<Timestamp> on_gpu;  // else
  };
  struct Event {
    std::string name, path;
    bool is_op = true;
    OpCost cost;
    Point from, to;
  };
  Point now();
  double since_start(const Point& point) const;

  Stream& stream_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  Point origin_;
  std::vector<Event> events_;
  std::vector<std::size_t> open_;  // indices of parts and the op that have not ended
};

}  // namespace moesaic
