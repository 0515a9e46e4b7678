#pragma once
// Memory of the ranks of a run, as `plan` and `doctor` see it: one rank of every stage of the pipeline.
#include <cstdint>
#include <optional>
#include <vector>

#include "core/train/memory_plan.h"

namespace moesaic::apps {

/// Documents count as that many tokens or longer unless something else is said; a run itself looks at its data.
constexpr std::int64_t kPlannedDocument = 64;

/// Ranks that the axes of the configuration need; without parallel.dp as few as the others allow.
int planned_ranks(const config::ParallelConfig& parallel);

/// What a rank of the run allocates, by a dry run on the backend that the configuration asks for (`auto` counts as a GPU), or on
/// the CPU's where this build has no CUDA kernels: of every stage the rank that needs most. Empty for configurations that can
/// be planned but not trained. Throws MemoryShortage with the largest need of all stages.
std::vector<MemoryPlan> plan_stages(const config::Config& config,
                                    const MemoryLimits& limits = {},
                                    std::int64_t least_document = kPlannedDocument);

/// The stage that needs most on the device; of none, 0.
std::size_t largest_on_device(const std::vector<MemoryPlan>& stages);
/// The stage whose offloaded experts need most in host memory and file; nothing where no stage has any.
std::optional<std::size_t> largest_offload(const std::vector<MemoryPlan>& stages);

std::uint64_t bytes_of(const std::vector<MemoryUse>& uses);

/// plan_stages() of the stage that needs most on the device.
std::optional<MemoryPlan> plan_rank_memory(const config::Config& config,
                                           const MemoryLimits& limits = {},
                                           std::int64_t least_document = kPlannedDocument);

}  // namespace moesaic::apps
