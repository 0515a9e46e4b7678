#pragma once
#include <filesystem>

#include "apps/doctor/facts.h"
#include "comm/communicator.h"
#include "core/config/config.h"

namespace moesaic::apps::doctor {

ProcessFacts read_process(int threads);
SharedMemoryFacts read_shared_memory(const std::filesystem::path& folder);
/// Writes and removes a file of 8 MiB in `wanted`, or in its nearest parent that exists, and nothing else.
DiskFacts read_disk(const std::filesystem::path& wanted);
CudaFacts read_cuda(bool is_asked_for);
/// The MPI library and who started this process; ranks are left at one.
LaunchFacts read_launch_facts();
/// All ranks call it; a few barriers.
ClockFacts measure_clock(Communicator& world);

}  // namespace moesaic::apps::doctor
