#pragma once
#include <cstdint>

#include "core/base/dtype.h"
#include "core/config/config.h"
#include "core/model/options.h"
#include "core/nn/tape.h"

namespace moesaic {

/// The modules' sizes and choices for a configuration that passed its checks. `tokens_per_micro_batch` turns
/// model.capacity_factor f into rows per expert: ceil(f T k / E).
ModelOptions model_options(const config::ModelConfig& model, const config::TrainConfig& train, std::int64_t tokens_per_micro_batch);

/// activations.recompute: [] and [none] = nothing, [full] = all that may be, else the patterns.
RecomputePolicy recompute_policy(const config::ActivationsConfig& activations);

/// run.precision; `auto` is bf16 on a GPU and f32 on a CPU.
Precision precision_of(const config::RunConfig& run, bool on_gpu);

}  // namespace moesaic
