#include <utility>

#include <fmt/format.h>

#include "core/config/check_topics.h"

namespace moesaic::config {

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
