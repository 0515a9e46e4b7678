#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "apps/plan_recompute.h"
#include "apps/plan_stages.h"
#include "core/config/load.h"
#include "core/model/pipeline_plan.h"
#include "core/model/plan.h"
#include "core/train/memory_plan.h"

namespace moesaic::apps {

/// The tables of `moesaic plan`; `stages` by plan_stages(), `recompute` as it is, those of the pipeline where there is one. With
/// `too_little` memory for what is offloaded, which the caller reports, experts in `stages` have the smallest caches. `least_document`: of
/// plan_stages().
std::string plan_text(const config::LoadedConfig& loaded,
                      const ModelPlan& plan,
                      const std::vector<MemoryPlan>& stages,
                      const std::string& recompute,
                      const std::optional<PipelinePlan>& pipeline,
                      std::int64_t least_document,
                      bool too_little);

/// The same as JSON, every count a plain integer, keys in a fixed order.
std::string plan_json(const config::LoadedConfig& loaded,
                      const ModelPlan& plan,
                      const std::vector<MemoryPlan>& stages,
                      const std::vector<RecomputeChoice>& recompute,
                      const std::optional<PipelinePlan>& pipeline);

/// Member `pipeline` of that, with every action of the schedule and its times.
std::string schedule_json(const PipelinePlan& plan);

}  // namespace moesaic::apps
