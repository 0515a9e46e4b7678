#include <functional>
#include <utility>

#include <fmt/format.h>

#include "core/config/check_topics.h"
#include "core/config/phase_extent.h"

namespace moesaic::config {
namespace {

using Add = std::function<void(std::vector<std::string> keys, std::string message)>;

// What no number of ranks can put right; the layout is looked at where it is known (core/train/expert_updates.h).
void early_updates(const Config& config, const Add& add) {
  const std::string key = "experts.update", otherwise = "; allowed: after_step, or ";
  if (config.experts.update == ExpertUpdateTime::after_step) return;
  if (config.experts.offload != ExpertOffload::full)
    add({key, "experts.offload"},
        fmt::format("in_backward is for experts whose gradients are offloaded, and experts.offload "
                    "is {}{}offload: full",
                    name_of(config.experts.offload),
                    otherwise));
  if (config.optimizer.clip_grad_norm != 0)
    add({key, "optimizer.clip_grad_norm"},
        fmt::format("in_backward updates experts before the norm of all gradients is known, and "
                    "optimizer.clip_grad_norm is {:g}{}clip_grad_norm: 0",
                    config.optimizer.clip_grad_norm,
                    otherwise));
  if (config.optimizer.untouched == Untouched::skip)
    add({key, "optimizer.untouched"},
        fmt::format("in_backward updates experts before the tokens of all ranks are counted, which "
                    "optimizer.untouched: skip reads{}untouched: dense or lazy",
                    otherwise));
  if (config.parallel.pp > 1)
    add({key, "parallel.pp"},
        fmt::format("in_backward needs the losses of all micro-batches before the first gradient "
                    "is final, and parallel.pp is {}{}pp: 1 and order: vertical",
                    config.parallel.pp,
                    otherwise));
  if (config.parallel.pp > 1 || config.parallel.order == LayerOrder::vertical ||
      !config.parallel.dp)
    return;
  for (const PhaseExtent& phase : phase_extents(config)) {
    const std::int64_t micro_batches =
        phase.global_batch_size / (phase.micro_batch_size * *config.parallel.dp);
    if (micro_batches <= 1) continue;
    return add(
        {key, "parallel.order"},
        fmt::format("in_backward needs the losses of all micro-batches before the first gradient "
                    "is final, and parallel.order is horizontal with {} micro-batches a step{}"
                    "order: vertical",
                    micro_batches,
                    otherwise));
  }
}

}  // namespace

// Budgets alone are no mistake: offload is turned off and on to compare.
void add_offload_findings(const Config& config, std::vector<Finding>& findings) {
  const auto add = [&](std::vector<std::string> keys, std::string message) {
    findings.push_back({std::move(keys), std::move(message)});
  };
  const ExpertsConfig& experts = config.experts;
  const MemoryConfig& memory = config.memory;
  if (memory.file_budget && !memory.file_path)
    add({"memory.file_budget", "memory.file_path"},
        "needs memory.file_path, the folder of the file; set it, or file_budget: null");
  if (memory.file_path && !memory.file_budget)
    add({"memory.file_path", "memory.file_budget"},
        "needs memory.file_budget, the ceiling of the file's size; set it, or file_path: null");
  if (memory.file_budget && !memory.host_budget)
    add({"memory.file_budget", "memory.host_budget"},
        "the file holds what memory.host_budget does not; set that, or file_budget and "
        "file_path: null");
  if (experts.device_cache && memory.device_budget && *experts.device_cache > *memory.device_budget)
    add({"experts.device_cache", "memory.device_budget"},
        fmt::format("found {}; allowed: at most memory.device_budget ({}), or null to take what "
                    "the rest of the run leaves of it",
                    *experts.device_cache,
                    *memory.device_budget));
  if (experts.touch_log && experts.offload != ExpertOffload::full)
    add({"experts.touch_log", "experts.offload"},
        "is of use with experts.offload: full only, where the host knows which experts a "
        "micro-batch uses; set that, or touch_log: null");
  early_updates(config, add);
  if (experts.offload == ExpertOffload::none) return;
  if (config.model.num_experts == 0)
    add({"experts.offload", "model.num_experts"},
        "there are no experts (model.num_experts is 0); allowed: none");
  if (experts.replicas > 0)
    add({"experts.replicas", "experts.offload"},
        "offloaded experts have no copies on other ranks yet; allowed: replicas: 0, or offload: "
        "none");
}

}  // namespace moesaic::config
