#pragma once
#include <string>
#include <vector>

#include "apps/assembly.h"
#include "apps/device_peak.h"
#include "core/data/blend.h"
#include "core/train/memory_plan.h"
#include "core/train/run_sink.h"

namespace moesaic::apps {

/// What is known about a life of a run before its first step.
struct RunFacts {
  const config::LoadedConfig& loaded;
  const Assembly& assembly;
  Communicator& host;  ///< all ranks
  const data::Blend& train;
  const data::TokenSource* valid = nullptr;
  const MemoryPlan* memory = nullptr;  ///< what was planned; null: nothing
  std::string device_line;             ///< on a GPU: its memory, planned and counted
  bool uses_nccl = false;
  int ranks_per_node = 0;  ///< 0 = all
  std::string mpi_version;
  DevicePeak peak;
  std::int64_t steps_done = 0;
  bool continues = false;
  std::string checkpoint;  ///< that it continues from, where that was named
};

/// The header of a run: for machines, and as lines for a reader. All ranks call this.
RunHeader run_header(const RunFacts& facts);

}  // namespace moesaic::apps
