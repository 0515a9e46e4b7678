// What a run will need, before it starts.
#include <algorithm>

#include <fmt/format.h>

#include "apps/host_memory.h"
#include "apps/memory_shortages.h"
#include "apps/train_run.h"
#include "core/model/from_config.h"
#include "memory/device_hooks.h"

namespace moesaic::apps {
namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

}  // namespace

void TrainRun::plan_and_check_memory(Device device) {
  const auto who = [&](int rank) {
    const auto stages = static_cast<int>(config().parallel.pp);
    return stages == 1 ? fmt::format("rank {}", rank)
                       : fmt::format("rank {} (stage {})", rank, rank / (host_.size() / stages));
  };
  plan_on_all_ranks(
      host_, [&] { plan_memory_of_rank(device); }, who);
}

// On a GPU, and where something is promised or refused by the plan.
void TrainRun::plan_memory_of_rank(Device device) {
  const bool on_gpu = device.kind == Device::Kind::cuda;
  const bool offloads_experts = config().experts.offload != config::ExpertOffload::none;
  const auto& activations = config().activations;
  const bool offloads =
      offloads_experts || activations.residual_offload || !activations.offload.empty();
  if (!on_gpu && !offloads && !config().memory.device_budget) return;
  std::vector<data::DocumentBound> documents{train_.document_bound()};
  if (valid_) documents.emplace_back(*valid_);
  MemoryLimits limits;
  if (on_gpu) {
    device_use_.emplace(device);
    limits.device_free = cuda::device_memory(device).free;
  }
  if (offloads && !config().memory.host_budget) {
    if (const auto available = available_host_memory())
      limits.host = *available / static_cast<std::uint64_t>(std::max(1, place_.local_size));
    host_.barrier();  // all have looked before one takes
  }
  memory_plan_ = plan_memory(config(),
                             device,
                             precision_of(config(), on_gpu),
                             documents,
                             host_.size(),
                             host_.rank(),
                             limits);
  check_budget();
  if (on_gpu) check_memory();
}

void TrainRun::check_budget() const {
  const auto& budget = config().memory.device_budget;
  if (!budget || memory_plan_->total() <= static_cast<std::size_t>(*budget)) return;
  throw MemoryShortage(
      MemoryShortage::Where::device,
      memory_plan_->total(),
      fmt::format("memory.device_budget is {} bytes, and this run needs {} of device "
                  "memory:\n{}Raise it, or use "
                  "a smaller train.micro_batch_size or data.sequence_length, "
                  "activations.recompute=[full], activations.piece_tokens, more "
                  "ranks, or experts.offload.",
                  *budget,
                  memory_plan_->total(),
                  memory_plan_->table()));
}

// A run that does not fit says so before it starts anything.
void TrainRun::check_memory() const {
  const auto memory = cuda::device_memory(memory_plan_->device);
  // The context is there already.
  if (memory_plan_->total() - memory_plan_->runtime <= memory.free) return;
  throw MemoryShortage(
      MemoryShortage::Where::device,
      memory_plan_->total(),
      fmt::format(
          "this run needs {:.1f} GiB on {} ({}), which has {:.1f} of {:.1f} GiB free:\n{}Use more "
          "GPUs, "
          "a smaller train.micro_batch_size or data.sequence_length, "
          "activations.recompute=[full], or activations.piece_tokens.",
          static_cast<double>(memory_plan_->total()) / kGiB,
          to_string(memory_plan_->device),
          cuda::device_name(memory_plan_->device),
          static_cast<double>(memory.free) / kGiB,
          static_cast<double>(memory.total) / kGiB,
          memory_plan_->table()));
}

// The plan beside the driver's count.
std::string TrainRun::memory_text() {
  if (!device_use_) return "";
  device_use_->look();
  return device_use_->line(*memory_plan_);
}

}  // namespace moesaic::apps
