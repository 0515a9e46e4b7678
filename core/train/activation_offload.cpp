#include "core/train/activation_offload.h"

#include <algorithm>

namespace moesaic {

StepPasses StepPasses::of_one_chunk() {
  return {.slots = {1},
          .passes = {{.is_backward = false, .chunk = 0, .slot = 0, .micro_batch = 0},
                     {.is_backward = true, .chunk = 0, .slot = 0, .micro_batch = 0}}};
}

StepPasses StepPasses::of_schedule(const pipeline::Schedule& schedule,
                                   const pipeline::Executor::Needs& needs,
                                   int stage) {
  StepPasses result;
  const auto& chunks = schedule.placement.chunks_of(stage);
  for (const int c : chunks)
    result.slots.push_back(needs.slots[static_cast<std::size_t>(c)]);
  const auto& actions = schedule.ranks[static_cast<std::size_t>(stage)];
  for (std::size_t i = 0; i < actions.size(); ++i) {
    const pipeline::Action& a = actions[i];
    if (a.work != pipeline::Work::forward && a.work != pipeline::Work::backward) continue;
    const auto here = std::find(chunks.begin(), chunks.end(), a.chunk) - chunks.begin();
    result.passes.push_back({.is_backward = a.work == pipeline::Work::backward,
                             .chunk = static_cast<int>(here),
                             .slot = needs.slot_of_action[i],
                             .micro_batch = a.micro_batch});
  }
  return result;
}

offload::Options offload_pace(int micro_batches) {
  const int lead = std::clamp(micro_batches / 4, 2, 4);
  return {.lead = lead, .stay = std::max(6, 2 * lead)};
}

std::optional<ActivationOffload> ActivationOffload::make(const Model& model,
                                                         const StepPasses& passes) {
  OffloadVisits visits(model, passes.slots);
  if (visits.sizes().empty()) return std::nullopt;
  for (const ChunkPass& pass : passes.passes)
    visits.add(pass);
  int micro_batches = 0;
  for (const ChunkPass& pass : passes.passes)
    micro_batches = std::max(micro_batches, pass.micro_batch + 1);
  offload::Plan plan =
      offload::make_plan(visits.sizes(), visits.visits(), offload_pace(micro_batches));
  return ActivationOffload(std::move(visits), std::move(plan));
}

std::vector<TensorView> ActivationOffload::parts(const offload::Offloader& offloader,
                                                 int chunk,
                                                 int slot) const {
  std::vector<TensorView> parts;
  for (const int tensor : visits_.tensors(chunk, slot))
    parts.push_back(offloader.place_of(tensor));
  return parts;
}

}  // namespace moesaic
