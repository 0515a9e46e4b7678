#pragma once
// The memory of a model that only runs forward: evaluation and generation.
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/config/config.h"
#include "core/model/model.h"
#include "core/train/memory_plan.h"
#include "memory/tiers/visits.h"

namespace moesaic {

/// What batches look like. Kernels are chosen by these sizes, so the bits of results may depend on them.
struct ForwardWindow {
  std::int64_t tokens = 0;     ///< of a batch, exactly
  std::int64_t longest = 0;    ///< no document has more tokens
  std::int64_t documents = 2;  ///< no batch has more, a filler at its end counted
};

/// Bytes on the device beside the weights, the most over all windows.
struct ForwardSizes {
  std::size_t scratch = 0, transient = 0, slot = 0;  ///< as StepMemory has them
  std::size_t batch = 0;                             ///< of SequenceBuffers
  std::size_t losses = 0;
  std::size_t results = 0;
  std::int64_t tokens = 0;  ///< of the longest window
};

struct ForwardPlan {
  MemoryPlan memory;  ///< with `tiers` only where experts have to be offloaded
  ForwardSizes sizes;
};

/// What the keys ask of a model that runs on one rank without others, whole, with weights alone.
struct ForwardRun {
  const config::Config& config;
  Device device;
  Precision precision;
  bool sparse = true;  ///< sparse attention; else the dense warm-up
  std::span<const ForwardWindow> windows;
  int rank = 0;  ///< of all ranks, each with a model of its own: in the name of the file
};

/// Plans it by a dry run. Where all weights fit into memory.device_budget and `limits` (and experts' into experts.device_cache)
/// all of them are on the device, whatever experts.offload says. Else, with `experts.offload: full`, experts get the caches
/// that are left and homes in host memory and in the file, as plan_memory() deals them. Throws MemoryShortage with what is
/// needed and the keys to change. No device is touched.
ForwardPlan plan_forward(const ForwardRun& run, const MemoryLimits& limits);

/// The visits of offloaded experts that a batch makes, for ExpertTiers::set_schedule(); those of the MTP module, which only
/// training runs, are none of them.
std::vector<tiers::Visit> forward_visits(Model& model);

}  // namespace moesaic
