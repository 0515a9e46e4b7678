#pragma once
#include <string>
#include <vector>

#include "apps/doctor/facts.h"

namespace moesaic::apps::doctor {

/// warn: it runs, but slowly or with a risk. fail: it does not.
enum class Health { ok, warn, fail };

/// A line of the report.
struct Finding {
  Health health = Health::ok;
  std::string what;    ///< "shared memory"
  std::string found;   ///< "/dev/shm 64.0 MiB, 64.0 MiB free"
  std::string advice;  ///< what to do; empty when all is well
};
using Findings = std::vector<Finding>;

// One function for each group of facts; pure, one line or more each.
Findings judge_launch(const LaunchFacts& facts, const ProcessFacts& process);
Findings judge_process(const ProcessFacts& facts, const LaunchFacts& launch);
Findings judge_limits(const ProcessFacts& facts);
Findings judge_shared_memory(const SharedMemoryFacts& facts, int local_ranks, int gpus);
Findings judge_disk(const DiskFacts& facts);
/// judge_offload.cpp
Findings judge_offload(const OffloadFacts& facts, const ProcessFacts& process, int local_ranks);
/// judge_offload.cpp
Finding judge_memory_plan(const MemoryPlanFacts& facts);
Findings judge_cuda(const CudaFacts& facts, const LaunchFacts& launch);
/// Nothing where no rank sees a GPU.
Findings judge_gpus_of_ranks(const GpusOfRanks& facts, bool is_asked_for);
Findings judge_clock(const ClockFacts& facts, int rank);

/// What /dev/shm should hold for this many ranks of one machine: buffers of Open MPI between processes (16 MiB a rank),
/// and of NCCL (64 MiB a rank). At least two ranks are counted.
std::uint64_t shared_memory_needed(int local_ranks, int gpus);

}  // namespace moesaic::apps::doctor
