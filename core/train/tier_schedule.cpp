#include "core/train/tier_schedule.h"

#include <algorithm>
#include <map>

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

std::int32_t at_once(const UpdatePace& pace) {
  return std::min(pace.layers, 1) * pace.parts;
}
std::int32_t before(const tiers::Visit& visit, const UpdatePace& pace) {
  const bool is_forward = visit.kind == tiers::VisitKind::forward;
  return (is_forward ? visit.layer + 1 : pace.layers) * pace.parts;
}
std::int32_t after(const tiers::Visit& visit, const UpdatePace& pace) {
  if (visit.kind != tiers::VisitKind::forward) return pace.layers * pace.parts;
  // From where the layer before ended, or the step, to where this one ends.
  const std::int32_t begin = visit.layer == 0 ? 1 : visit.layer + kAhead,
                     end = visit.layer + 1 + kAhead;
  const std::int32_t due =
      std::min(begin * pace.parts + (end - begin) * (visit.micro_batch + 1), end * pace.parts);
  return std::min(due, pace.layers * pace.parts);
}
}  // namespace updates_due

std::int32_t update_parts(const std::vector<tiers::Visit>& step) {
  std::int32_t parts = 0;
  for (const tiers::Visit& v : step) {
    if (v.layer != 0 || v.kind != tiers::VisitKind::forward) {
      if (parts > 0) break;
      continue;  // another layer comes first: nothing is known to follow
    }
    ++parts;
  }
  return std::max(parts, 1);
}

std::vector<tiers::Visit> with_updates_beside(const std::vector<tiers::Visit>& step) {
  UpdatePace pace{.parts = update_parts(step)};
  for (const tiers::Visit& v : step)
    pace.layers = std::max(pace.layers, v.layer + 1);
  std::vector<tiers::Visit> visits;
  std::int32_t done = updates_due::at_once(pace);
  const std::int32_t at_once = done;
  const auto update = [&](std::int32_t until) {
    for (; done < until; ++done)
      if (done % pace.parts == 0)
        visits.push_back({done / pace.parts, tiers::VisitKind::update, 0});
  };
  for (const tiers::Visit& v : step) {
    if (v.kind == tiers::VisitKind::update) continue;
    update(updates_due::before(v, pace));
    visits.push_back(v);
    update(updates_due::after(v, pace));
  }
  done = 0;
  update(at_once);
  return visits;
}

std::vector<tiers::Visit> with_updates_in_backward(const std::vector<tiers::Visit>& step) {
  std::map<std::int32_t, std::size_t> last;  // backward, by layer
  for (std::size_t i = 0; i < step.size(); ++i)
    if (step[i].kind == tiers::VisitKind::backward) last[step[i].layer] = i;
  std::vector<tiers::Visit> visits;
  for (std::size_t i = 0; i < step.size(); ++i) {
    if (step[i].kind == tiers::VisitKind::update) continue;
    visits.push_back(step[i]);
    if (step[i].kind == tiers::VisitKind::backward && last.at(step[i].layer) == i)
      visits.push_back({step[i].layer, tiers::VisitKind::update, 0});
  }
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
