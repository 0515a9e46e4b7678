#include "apps/planned_memory.h"

#include <algorithm>

#include <fmt/format.h>

#include "memory/device_hooks.h"

namespace moesaic::apps {
namespace {

constexpr double kMiB = 1024.0 * 1024.0, kGiB = 1024.0 * kMiB;

// In GiB, or MiB where both are small.
std::string pair(std::size_t planned, const char* who, std::size_t counted) {
  const bool small = std::max(planned, counted) < (std::size_t{1} << 30);
  const double unit = small ? kMiB : kGiB;
  const char* name = small ? "MiB" : "GiB";
  const auto p = static_cast<double>(planned), c = static_cast<double>(counted);
  return fmt::format("planned {:.2f} {}; as {} {:.2f} {} ({:+.1f} %)",
                     p / unit,
                     name,
                     who,
                     c / unit,
                     name,
                     planned == 0 ? 0 : 100 * (c / p - 1));
}

}  // namespace

PlannedMemory::PlannedMemory(Device device) : device_(device) {
  look();
  before_ = most_;
}

void PlannedMemory::look() {
  std::size_t used = 0;
  if (device_.kind == Device::Kind::cuda) {
    const auto memory = cuda::device_memory(device_);
    used = memory.total - memory.free;
    total_ = memory.total;
  } else {
    for (const MemoryUse& use : memory_in_use())
      used += use.bytes;
  }
  most_ = std::max(most_, used);
}

std::size_t PlannedMemory::planned(const MemoryPlan& plan) const {
  std::size_t bytes = plan.total() - plan.runtime;
  if (device_.kind == Device::Kind::cuda) return bytes;
  for (const MemoryUse& use : plan.host)
    bytes += use.bytes;
  return bytes;
}

std::string PlannedMemory::line(const MemoryPlan& plan) const {
  if (device_.kind != Device::Kind::cuda) return pair(planned(plan), "buffers count", counted());
  return fmt::format("{} + {:.2f} GiB for the CUDA context and other processes, of {:.1f} GiB",
                     pair(planned(plan), "the driver counts", counted()),
                     static_cast<double>(before_) / kGiB,
                     static_cast<double>(total_) / kGiB);
}

}  // namespace moesaic::apps
