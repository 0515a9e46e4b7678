#include "core/train/tier_schedule.h"

#include <algorithm>

#include "core/model/pipeline_plan.h"

namespace moesaic {
namespace {

// The MTP module comes after the layers and belongs to the last chunk.
std::vector<std::int32_t> layers_of_chunks(const PipelineLayout& layout, Model& model) {
  std::vector<std::int32_t> counts;
  for (std::size_t c = 0; c < layout.chunks.size(); ++c) {
    std::int32_t count = 0;
    for (const auto& named : model.moe_layers()) {
      const bool is_after = c + 1 == layout.chunks.size() && named.layer >= layout.chunks[c].end;
      const bool is_inside =
          layout.chunks[c].begin <= named.layer && named.layer < layout.chunks[c].end;
      count += is_inside || is_after ? 1 : 0;
    }
    counts.push_back(count);
  }
  return counts;
}

}  // namespace

std::vector<tiers::Visit> pipeline_visits(const pipeline::Schedule& schedule,
                                          int stage,
                                          const std::vector<std::int32_t>& layers_of_chunk) {
  const auto size = [&](int chunk) { return layers_of_chunk[static_cast<std::size_t>(chunk)]; };
  // Layers here, chunk by chunk.
  const auto first_layer = [&](int chunk) {
    std::int32_t first = 0;
    for (const int c : schedule.placement.chunks_of(stage))
      if (c < chunk) first += size(c);
    return first;
  };
  std::vector<tiers::Visit> visits;
  for (const pipeline::Action& action : schedule.ranks[static_cast<std::size_t>(stage)]) {
    if (action.is_exchange() || action.work == pipeline::Work::backward_weight) continue;
    const bool is_forward = action.work == pipeline::Work::forward;
    const std::int32_t first = first_layer(action.chunk), count = size(action.chunk);
    for (std::int32_t i = 0; i < count; ++i)
      visits.push_back({first + (is_forward ? i : count - 1 - i),
                        is_forward ? tiers::VisitKind::forward : tiers::VisitKind::backward,
                        action.micro_batch});
  }
  std::int32_t layers = 0;
  for (const int c : schedule.placement.chunks_of(stage))
    layers += size(c);
  for (std::int32_t l = layers; l-- > 0;)
    visits.push_back({l, tiers::VisitKind::update, 0});
  return visits;
}

namespace updates_due {
namespace {
// What one forward takes must cover what the next one waits for: the layer after it, and one more in the queue.
constexpr std::int32_t kAhead = 2;
}  // namespace

std::int32_t at_once(std::int32_t layers) {
  return std::min(layers, 1);
}
std::int32_t before(const tiers::Visit& visit, std::int32_t layers) {
  return visit.kind == tiers::VisitKind::forward ? visit.layer + 1 : layers;
}
std::int32_t after(const tiers::Visit& visit, std::int32_t layers) {
  return visit.kind == tiers::VisitKind::forward ? std::min(layers, visit.layer + 1 + kAhead)
                                                 : layers;
}
}  // namespace updates_due

std::vector<tiers::Visit> with_updates_beside(const std::vector<tiers::Visit>& step) {
  std::int32_t layers = 0;
  for (const tiers::Visit& v : step)
    layers = std::max(layers, v.layer + 1);
  std::vector<tiers::Visit> visits;
  std::int32_t done = updates_due::at_once(layers);
  const std::int32_t at_once = done;
  const auto update = [&](std::int32_t until) {
    for (; done < until; ++done)
      visits.push_back({done, tiers::VisitKind::update, 0});
  };
  for (const tiers::Visit& v : step) {
    if (v.kind == tiers::VisitKind::update) continue;
    update(updates_due::before(v, layers));
    visits.push_back(v);
    update(updates_due::after(v, layers));
  }
  done = 0;
  update(at_once);
  return visits;
}

std::vector<tiers::Visit> expert_visits(const config::Config& config,
                                        const Phase& phase,
                                        Model& model,
                                        const MeshPosition& position) {
  const std::int64_t micro_batches = phase.micro_batches(position.extent(Axis::dp));
  if (has_schedule(config))
    return pipeline_visits(pipeline_schedule(config, micro_batches, phase.pieces),
                           position.coordinate(Axis::pp),
                           layers_of_chunks(pipeline_layout(config), model));
  return tiers::step_visits(static_cast<std::int32_t>(model.moe_layers().size()),
                            static_cast<std::int32_t>(micro_batches),
                            tiers::VisitOrder::horizontal,
                            tiers::Updates::dense);
}

}  // namespace moesaic
