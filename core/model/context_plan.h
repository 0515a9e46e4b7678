#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "core/config/config.h"
#include "core/model/plan.h"

namespace moesaic {

/// How unequal the ranks along Axis::cp are: pieces of a micro-batch are contiguous, and later tokens see more keys.
struct ContextPlan {
  struct Phase {
    std::int64_t piece_tokens = 0;
    /// Operations in forward for a rank's piece of a micro-batch, documents as long as their sequences (shorter ones are
    /// more equal): products with parameters, cores of attention at each token's own context, the indexer's scores shared
    /// by pairs of ranks, and the per-head keys and values that a rank forms of all tokens before its own.
    std::vector<double> work;
    double busiest_over_mean() const;
  };
  std::vector<Phase> phases;  ///< of the run, in order
};

/// Empty without context parallelism. `plan`: of the same configuration, which passed its checks.
std::optional<ContextPlan> plan_context(const config::Config& config, const ModelPlan& plan);

}  // namespace moesaic
