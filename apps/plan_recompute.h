#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/config/config.h"
#include "core/model/plan.h"
#include "core/train/memory_plan.h"

namespace moesaic::apps {

/// What a setting of activations.recompute would cost.
struct RecomputeChoice {
  std::string policy;  ///< "none", "selective", "full", or "as set" for patterns
  bool is_set = false;
  struct LayerKind {
    std::string name;  ///< "KDA + MoE"
    std::optional<std::int64_t>
        saved;  ///< bytes that a layer keeps of a micro-batch, before it is split over ranks
  };
  std::vector<LayerKind> kinds;  ///< in the order of the model
  MemoryPlan memory;             ///< of the rank that needs most
};

/// none, selective and full, in the order of what they compute again, and the patterns of the configuration, if it has some,
/// at the end. Empty for configurations that cannot be trained. `least_document`: of plan_rank_memory().
std::vector<RecomputeChoice> plan_recompute(const config::Config& config,
                                            std::int64_t least_document);

/// The choice that computes least again of those that fit `budget` bytes (patterns do not take part); null: none does.
const RecomputeChoice* cheapest_within(const std::vector<RecomputeChoice>& choices,
                                       std::int64_t budget);

/// The table, and with a budget the line about the cheapest choice.
std::string recompute_text(const std::vector<RecomputeChoice>& choices,
                           std::optional<std::int64_t> budget);

}  // namespace moesaic::apps
