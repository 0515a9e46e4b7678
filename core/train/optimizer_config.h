#pragma once
#include "core/config/config.h"
#include "core/train/optimizer.h"

namespace moesaic {

/// The section `optimizer` of a configuration, as far as it concerns updates (the schedule is in core/train/phases.h).
OptimizerOptions optimizer_options(const config::OptimizerConfig& config);
/// How the state of this configuration is dealt to ranks; nothing with parallel.zero: 0.
std::optional<StateSharding> state_sharding(const config::Config& config, Model& model);

}  // namespace moesaic
