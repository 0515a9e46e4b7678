#include "apps/plan_stages.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "apps/memory_shortages.h"
#include "core/config/check.h"
#include "core/model/from_config.h"
#include "kernels/ops/op_list.h"
#include "memory/device_hooks.h"

namespace moesaic::apps {

int planned_ranks(const config::ParallelConfig& parallel) {
  const std::int64_t dense = parallel.cp * parallel.tp;
  const std::int64_t least = std::lcm(dense, parallel.ep * parallel.etp) / dense;
  return static_cast<int>(parallel.pp * parallel.dp.value_or(least) * dense);
}

std::vector<MemoryPlan> plan_stages(const config::Config& config,
                                    const MemoryLimits& limits,
                                    std::int64_t least_document) {
  if (!config::untrainable(config).empty()) return {};
  const data::DocumentBound documents(least_document);
  const bool wants_cuda = config.run.device != config::DeviceChoice::cpu;
  const bool has_cuda = cuda::is_built() && missing_cuda_ops().empty();
  const int ranks = planned_ranks(config.parallel), stages = static_cast<int>(config.parallel.pp);
  // Along Axis::cp the last rank sees the most keys.
  const auto last_piece = static_cast<int>((config.parallel.cp - 1) * config.parallel.tp);
  std::vector<MemoryPlan> plans;
  std::vector<Shortage> shortages;
  for (int stage = 0; stage < stages; ++stage) {
    const auto plan_of = [&](int rank) {
      return plan_memory(config,
                         wants_cuda && has_cuda ? Device{Device::Kind::cuda, 0} : kCpu,
                         precision_of(config, wants_cuda),
                         {&documents, 1},
                         ranks,
                         rank,
                         limits);
    };
    const int rank = stage * (ranks / stages) + last_piece;
    shortages.emplace_back();
    try {
      MemoryPlan plan = plan_of(rank);
      // Its caches and homes are the largest; another rank has as many bytes of state, of other parameters.
      if (plan.rank_of_states && *plan.rank_of_states != rank) plan = plan_of(*plan.rank_of_states);
      plans.push_back(std::move(plan));
    } catch (const MemoryShortage& e) {
      shortages.back() = e;
    }
  }
  if (const Shortage most =
          largest(shortages, [](int stage) { return fmt::format("stage {}", stage); }))
    throw *most;
  return plans;
}

std::uint64_t bytes_of(const std::vector<MemoryUse>& uses) {
  std::uint64_t bytes = 0;
  for (const MemoryUse& use : uses)
    bytes += use.bytes;
  return bytes;
}

std::size_t largest_on_device(const std::vector<MemoryPlan>& stages) {
  const auto most =
      std::max_element(stages.begin(), stages.end(), [](const auto& a, const auto& b) {
        return a.total() < b.total();
      });
  return static_cast<std::size_t>(most - stages.begin());
}

std::optional<std::size_t> largest_offload(const std::vector<MemoryPlan>& stages) {
  const auto offloaded = [](const MemoryPlan& plan) {
    return host_bytes(plan.tier_parts) + file_bytes(plan.tier_parts);
  };
  std::optional<std::size_t> most;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    if (stages[s].tier_parts.empty()) continue;
    if (!most || offloaded(stages[s]) > offloaded(stages[*most])) most = s;
  }
  return most;
}

std::optional<MemoryPlan> plan_rank_memory(const config::Config& config,
                                           const MemoryLimits& limits,
                                           std::int64_t least_document) {
  std::vector<MemoryPlan> stages = plan_stages(config, limits, least_document);
  if (stages.empty()) return std::nullopt;
  return std::move(stages[largest_on_device(stages)]);
}

}  // namespace moesaic::apps
