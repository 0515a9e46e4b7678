#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "core/config/check.h"
#include "core/config/config.h"
#include "core/model/options.h"
#include "core/nn/module.h"
#include "core/nn/tape.h"
#include "parallel/mesh.h"

namespace moesaic {

class Model;

/// The modules' sizes and choices for a configuration that passed its checks.
ModelOptions model_options(const config::Config& config);

/// The degrees of section `parallel`; without parallel.dp all ranks that the other axes leave.
MeshConfig mesh_config(const config::ParallelConfig& parallel);

/// activations.recompute: [] and [none] = nothing, [full] = all that may be, else the patterns; among them "selective" for
/// what costs no product. Also what activations.residual_offload and activations.offload say.
RecomputePolicy recompute_policy(const config::ActivationsConfig& activations);
/// Patterns of activations.recompute and activations.offload that match no activation of the model, and those of recompute
/// that match one that a step chooses. Leaves the model planned for `bounds`, any
/// that fit its layout.
std::vector<config::Finding> recompute_findings(Model& model,
                                                const config::ActivationsConfig& activations,
                                                const Bounds& bounds = {.tokens = 64});

/// run.precision and optimizer.master; `auto` is bf16 on a GPU and f32 on a CPU. Throws UsageError when masters should be
/// split and the model does not compute in bf16.
Precision precision_of(const config::Config& config, bool on_gpu);

/// Whether a phase does not train a parameter: its declared name (with the "{}" of a family)
/// matches a freeze pattern, or the indexer warms up beside dense attention and the parameter is
/// not the indexer's (SPEC 3.4).
bool is_frozen(const ParameterSpec& spec, std::span<const std::string> freeze, bool dense_warmup);
/// The same for all parameters of a store, by index.
std::vector<bool> frozen_parameters(const ParameterStore& params, const config::PhaseConfig& phase);

/// What is wrong with the phases of a configuration once the parameters are known: patterns that
/// match nothing, phases that train nothing, frozen and trained parameters in one storage.
std::vector<config::Finding> phase_findings(const ParameterStore& params,
                                            const config::TrainConfig& train);

}  // namespace moesaic
