#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "core/model/offload_visits.h"
#include "memory/offload/offloader.h"
#include "parallel/pipeline/executor.h"
#include "parallel/pipeline/schedule.h"

namespace moesaic {

/// Which passes a step makes through a rank's chunks, in order, and how many micro-batches each chunk keeps.
struct StepPasses {
  std::vector<int> slots;  ///< by chunk of this stage
  std::vector<ChunkPass> passes;
  /// Of a model in one chunk: a micro-batch forward and backward, again and again.
  static StepPasses of_one_chunk();
  static StepPasses of_schedule(const pipeline::Schedule& schedule,
                                const pipeline::Executor::Needs& needs,
                                int stage);
};

/// How far ahead copies back begin. Where a layer's micro-batches follow each other (vertical order), a tensor that leaves is
/// needed again after as many visits, so that there is time: copies may have to wait for those of experts, which take the same link.
offload::Options offload_pace(int micro_batches);

/// activations.residual_offload and activations.offload, for one phase of a run: which tensors leave, when, and where they lie.
class ActivationOffload {
 public:
  /// Of a planned model; nothing when nothing leaves.
  static std::optional<ActivationOffload> make(const Model& model, const StepPasses& passes);
  const offload::Plan& plan() const noexcept { return plan_; }
  /// Memory for Model::make_micro_batch().
  std::vector<TensorView> parts(const offload::Offloader& offloader, int chunk, int slot) const;

 private:
  ActivationOffload(OffloadVisits visits, offload::Plan plan)
      : visits_(std::move(visits)), plan_(std::move(plan)) {}
  OffloadVisits visits_;
  offload::Plan plan_;
};

}  // namespace moesaic
