#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "apps/plan_recompute.h"
#include "core/config/load.h"
#include "core/model/pipeline_plan.h"
#include "core/model/plan.h"
#include "core/train/memory_plan.h"

namespace moesaic::apps {

/// What a rank of the run allocates on its device, by a dry run on the backend that the configuration asks for (`auto`
/// counts as a GPU), or on the CPU's where this build has no CUDA kernels; nothing for configurations that can be
/// planned but not trained. `least_document`: no document has fewer tokens; a run itself looks at its data.
constexpr std::int64_t kPlannedDocument = 64;
std::optional<MemoryPlan> plan_rank_memory(const config::Config& config,
                                           const MemoryLimits& limits,
                                           std::int64_t least_document);

/// Ranks that the axes of the configuration need; without parallel.dp as few as the others allow.
int planned_ranks(const config::ParallelConfig& parallel);

/// The tables of `moesaic plan`; `recompute` as it is, those of the pipeline where there is one. With `too_little` memory
/// for offloaded experts, which the caller reports, `rank` has the smallest caches. `least_document`: of plan_rank_memory().
std::string plan_text(const config::LoadedConfig& loaded,
                      const ModelPlan& plan,
                      const std::optional<MemoryPlan>& rank,
                      const std::string& recompute,
                      const std::optional<PipelinePlan>& pipeline,
                      std::int64_t least_document,
                      bool too_little);

/// The same as JSON, every count a plain integer, keys in a fixed order.
std::string plan_json(const config::LoadedConfig& loaded,
                      const ModelPlan& plan,
                      const std::optional<MemoryPlan>& rank,
                      const std::vector<RecomputeChoice>& recompute,
                      const std::optional<PipelinePlan>& pipeline);

/// Member `pipeline` of that, with every action of the schedule and its times.
std::string schedule_json(const PipelinePlan& plan);

}  // namespace moesaic::apps
