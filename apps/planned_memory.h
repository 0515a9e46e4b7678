#pragma once
#include <cstddef>
#include <string>

#include "core/train/memory_plan.h"

namespace moesaic::apps {

/// A plan beside what a run then takes: on a GPU by the driver's count of the device, which knows of everything there; on the
/// CPU by that of this process's buffers, offloaded ones included.
class PlannedMemory {
 public:
  /// At once on a GPU, behind the context and before anything else of the run: what is in use now is not the run's.
  explicit PlannedMemory(Device device);
  /// Looks again, and keeps the most. Between two looks nothing is seen.
  void look();
  /// "planned 90.92 GiB; as the driver counts 91.02 GiB (+0.1 %) + …"
  std::string line(const MemoryPlan& plan) const;
  /// Of the plan as it is compared, without the context, and the most that was counted; bytes.
  std::size_t planned(const MemoryPlan& plan) const;
  std::size_t counted() const { return most_ - before_; }

 private:
  Device device_;
  std::size_t before_ = 0, most_ = 0, total_ = 0;
};

}  // namespace moesaic::apps
