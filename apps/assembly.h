#pragma once
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "core/config/load.h"
#include "core/model/model.h"
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

/// Throws UsageError when the configuration asks for what cannot be trained, or for a device that is not there.
Assembly assemble(const config::Config& config, bool for_training);
/// run.device resolved: CUDA is refused with the list of ops that have no CUDA kernel yet.
Device resolve_device(const config::RunConfig& run);
/// The files of data.train or data.valid as one source.
std::shared_ptr<const data::TokenSource> open_tokens(const std::vector<std::string>& paths,
                                                     const config::Config& config);

}  // namespace moesaic::apps
