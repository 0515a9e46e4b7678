#pragma once
#include <string>

#include "core/config/config.h"
#include "core/model/plan.h"
#include "core/train/memory_plan.h"

namespace moesaic::apps {

/// What an H200 does, for the hint on how many tokens a step needs: bytes over the link per second each way when both are
/// busy, and operations per second in products.
constexpr double kLinkBytesPerSecond = 40e9, kProductsPerSecond = 600e12;

/// What offloaded experts move in a step of the first phase, and from how many tokens of a step on compute takes longer.
struct OffloadTraffic {
  TierLinkBytes bytes;
  double seconds = 0;  ///< of the busier direction at kLinkBytesPerSecond
  double tokens = 0;   ///< of all ranks
};
OffloadTraffic offload_traffic(const config::Config& config,
                               const ModelPlan& model,
                               const MemoryPlan& memory);

/// The part of `moesaic plan` about experts.offload: where the blocks are, and what moves. Empty without offload. `whose`: " of
/// stage 2" of a pipeline.
std::string offload_text(const config::Config& config,
                         const ModelPlan& model,
                         const MemoryPlan& memory,
                         const std::string& whose);
/// The same in a line, for the head of a run: "full, policy sched | on the device weights 31%, … ".
std::string offload_summary(const config::Config& config, const MemoryPlan& memory);

}  // namespace moesaic::apps
