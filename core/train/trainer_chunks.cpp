// What a step that follows a schedule over chunks is laid out in, and what activations that leave are.
#include <fmt/format.h>

#include "core/model/pipeline_plan.h"
#include "core/train/trainer.h"

namespace moesaic {

void Trainer::allocate_offload_host() {
  if (memory_.offload_host == 0) return;
  try {
    offload_host_ =
        make_host_buffer(memory_.offload_host, parts_.device, "offloaded activations, host");
  } catch (const ResourceError& e) {
    throw ResourceError(fmt::format(
        "activations that wait in host memory need {:.1f} GiB of {}host memory for this rank, "
        "which "
        "are not to be had ({}). Less takes: activations.recompute: [full], smaller or fewer "
        "micro-batches, fewer names in activations.offload, or residual_offload: false",
        static_cast<double>(memory_.offload_host) / (1024.0 * 1024 * 1024),
        parts_.device.kind == Device::Kind::cuda ? "pinned " : "",
        e.what()));
  }
}

void Trainer::place_offload(const StepPasses& passes) {
  offloader_.reset();
  offload_ = ActivationOffload::make(*parts_.model, passes);
  if (!offload_) return;
  const auto bytes = [](const Buffer& b) {
    return b.bytes() == 0 ? TensorView()
                          : b.view({static_cast<std::int64_t>(b.bytes())}, DType::u8);
  };
  offloader_ = std::make_unique<offload::Offloader>(
      offload_->plan(),
      offload::Offloader::Memory{bytes(offload_memory_), bytes(offload_host_)},
      parts_.stream_mode,
      parts_.offload_disturbance);
}

TensorView Trainer::piece_sums() const {
  const auto bytes = static_cast<std::int64_t>(piece_sum_memory_.bytes());
  return bytes == 0 ? TensorView() : piece_sum_memory_.view({bytes}, DType::u8);
}

Trainer::OffloadTraffic Trainer::offload_traffic() const {
  if (!offload_) return {};
  const std::size_t rounds = pipeline_ ? 1 : micro_batches_.size();
  return {offload_->plan().bytes_out * rounds, offload_->plan().bytes_in * rounds};
}

void Trainer::place_pipeline(const Phase& phase) {
  std::vector<Arena*> deferred;
  for (const auto& arena : deferred_)
    deferred.push_back(arena.get());
  const PipelineLayout layout = pipeline_layout(*parts_.config);
  const MeshPosition& position = parts_.params->position();
  const std::int64_t own_tokens =
      phase.piece_tokens() / (position.extent(Axis::cp) * position.extent(Axis::tp));
  pipeline::Schedule schedule =
      pipeline_schedule(*parts_.config, phase.micro_batches(ranks()), phase.pieces);
  pipeline::BundlePlan bundles =
      layout.bundles(parts_.model->options(), parts_.params->precision(), own_tokens);
  const int stage = position.coordinate(Axis::pp);
  place_offload(StepPasses::of_schedule(
      schedule, pipeline::Executor::needs(schedule, bundles, stage), stage));
  pipeline_ = std::make_unique<PipelineStep>(PipelineStep::Parts{
      .model = parts_.model,
      .params = parts_.params,
      .backend = &backend_->backend(),
      .comm = stages(),
      .mode = parts_.stream_mode,
      .schedule = std::move(schedule),
      .bundles = std::move(bundles),
      .slots = slot_memory_.view({static_cast<std::int64_t>(memory_.slot)}, DType::u8),
      .offloaded =
          [this](int chunk, int slot) {
            return offload_ ? offload_->parts(*offloader_, chunk, slot) : std::vector<TensorView>();
          },
      .transient = transient_.get(),
      .deferred = deferred,
      .context =
          [this](int micro_batch, Arena& arena, WeightGradients& gradients) {
            return training_context(static_cast<std::size_t>(micro_batch), arena, gradients);
          },
      .timer = timer_.get()});
}

}  // namespace moesaic
