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

/// How updates that run beside the next step's forward are spread over it. Where all micro-batches of a layer follow each
/// other, each of them takes a part of a layer's updates: enqueued all at once they would fill the queues of the streams, and
/// whatever else has to be copied or enqueued would wait until most of them are over.
struct UpdatePace {
  std::int32_t layers = 0;
  std::int32_t parts = 1;  ///< of a layer's updates
};
/// Forwards of the first layer that follow each other.
std::int32_t update_parts(const std::vector<tiers::Visit>& step);

/// When those updates are enqueued, layer by layer: parts below the number that is returned, counted over all layers. They
/// stay this far ahead of the forward, and are through before the first backward.
namespace updates_due {
std::int32_t at_once(const UpdatePace& pace);  ///< at the end of their own step
std::int32_t before(const tiers::Visit& visit, const UpdatePace& pace);
std::int32_t after(const tiers::Visit& visit, const UpdatePace& pace);
}  // namespace updates_due
/// The visits of a step with its updates there, each where its first part is: those of the step before, but for the ones that
/// it does at once.
std::vector<tiers::Visit> with_updates_beside(const std::vector<tiers::Visit>& step);
/// The visits of a step that updates each layer behind its last backward.
std::vector<tiers::Visit> with_updates_in_backward(const std::vector<tiers::Visit>& step);

/// The same of a stage whose chunks, all of the schedule's in order, have so many layers with experts. Of a split backward
/// the part for inputs counts.
std::vector<tiers::Visit> pipeline_visits(const pipeline::Schedule& schedule,
                                          int stage,
                                          const std::vector<std::int32_t>& layers_of_chunk);

}  // namespace moesaic
