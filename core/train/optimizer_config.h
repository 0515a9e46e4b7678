#pragma once
#include "core/config/training_config.h"
#include "core/train/optimizer.h"

namespace moesaic {

/// The section `optimizer` of a configuration, as far as it concerns updates (the schedule is in core/train/phases.h).
OptimizerOptions optimizer_options(const config::OptimizerConfig& config);

}  // namespace moesaic
