#pragma once
#include <string>
#include <vector>

#include "core/config/model_config.h"
#include "core/config/system_config.h"
#include "core/config/training_config.h"

namespace moesaic::config {

/// The whole configuration of a run, one member per section of the YAML file. Plain values;
/// `load_config` makes one that passed every check.
struct Config {
  std::vector<std::string> base;  ///< files that the main file builds on, as written there
  RunConfig run;
  ModelConfig model;
  DataConfig data;
  TrainConfig train;
  OptimizerConfig optimizer;
  ParallelConfig parallel;
  DispatchConfig dispatch;
  ActivationsConfig activations;
  ExpertsConfig experts;
  MemoryConfig memory;
  CheckpointConfig checkpoint;
  CommConfig comm;
  LogConfig log;
  DebugConfig debug;
  static void describe(Fields<Config>& f);
};

}  // namespace moesaic::config
