#pragma once
#include <vector>

#include "core/config/config.h"
#include "core/model/model.h"
#include "core/nn/parameter_store.h"
#include "core/train/phases.h"
#include "memory/tiers/visits.h"
#include "parallel/pipeline/schedule.h"

namespace moesaic {

/// In which order a step of the phase uses the experts of this rank, updates last. Layers count those with experts here.
std::vector<tiers::Visit> expert_visits(const config::Config& config,
                                        const Phase& phase,
                                        Model& model,
                                        const MeshPosition& position);

/// The same of a stage whose chunks, all of the schedule's in order, have so many layers with experts. Of a split backward
/// the part for inputs counts.
std::vector<tiers::Visit> pipeline_visits(const pipeline::Schedule& schedule,
                                          int stage,
                                          const std::vector<std::int32_t>& layers_of_chunk);

}  // namespace moesaic
