#pragma once
#include <memory>
#include <optional>
#include <string>

#include "apps/gpu_choice.h"
#include "comm/device_communicator.h"
#include "core/config/load.h"
#include "core/data/open_data.h"
#include "core/model/model.h"
#include "core/nn/expert_tiers.h"
#include "core/train/optimizer.h"
#include "core/train/trainer.h"

namespace moesaic::apps {

/// A model with its parameters, sealed and initialised, and what trains it: what several verbs build from a
/// configuration. Members are declared in the order in which they depend on each other.
struct Assembly {
  Precision precision;
  Device device;
  std::unique_ptr<ParameterStore> params;
  std::unique_ptr<Model> model;
  std::unique_ptr<Optimizer> optimizer;  ///< null without training
};

/// `position`: of this rank, which gets its part of the parameters. `tiers`: of offloaded experts, as plan_memory() and, without
/// training, plan_forward() give them; empty: in training planned here, for documents of any length, where the configuration
/// offloads experts; without training all are on the device. What does not train holds weights alone, not yet filled. Throws
/// UsageError when the configuration asks for what cannot be trained.
Assembly assemble(const config::Config& config,
                  bool for_training,
                  Device device,
                  const MeshPosition& position = {},
                  std::optional<ExpertTierOptions> tiers = std::nullopt);
/// The types of a model that only runs forward: weights have the bits that they have in training.
Precision forward_precision(const config::Config& config, bool on_gpu);
/// Throws UsageError with everything that the configuration asks for and this version cannot do.
void check_trainable(const config::Config& config);

/// run.device resolved for a rank, and made the calling thread's device. `host`: of all ranks, which then all call it; null:
/// this process is alone. Every rank takes a GPU of its own among those that its launcher shows it (gpu_choice.h). `auto` is
/// a GPU when one is there that runs this build and every op has a kernel for it. Throws UsageError when CUDA is asked for
/// and cannot be used, saying why, or when there is not a GPU for each rank and comm.share_gpu is not set.
Device resolve_device(const config::Config& config, Communicator* host = nullptr);
/// The GPU of a rank, as resolve_device() chooses it where CUDA is asked for.
Device gpu_of_rank(Communicator* host, bool share, const GpuWords& words);
/// "cpu" or "cuda" of a command line, made the calling thread's device. Throws UsageError as resolve_device() does.
Device device_from_name(const std::string& name);
DeviceCommOptions device_comm_options(const config::Config& config);
using data::open_tokens;
using data::open_training_data;

}  // namespace moesaic::apps
