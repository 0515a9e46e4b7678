#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include <unistd.h>

#include "apps/doctor/read_facts.h"
#include "comm/device_communicator.h"
#include "comm/launch_check.h"
#include "comm/mpi_environment.h"
#include "core/base/error.h"
#include "memory/device_hooks.h"

namespace moesaic::apps::doctor {
namespace {

const char* variable(const char* name) {
  return std::getenv(name);
}

// Of the library that this process has loaded.
std::string mapped_file(const std::string& name) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const auto slash = line.find('/');
    if (slash != std::string::npos && line.find("/" + name) != std::string::npos)
      return line.substr(slash);
  }
  return "";
}

std::string in_path(const std::string& program) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string file = folder + "/" + program;
    if (!folder.empty() && ::access(file.c_str(), X_OK) == 0) return file;
  }
  return "";
}

std::string name_of(Launch::By by) {
  switch (by) {
    case Launch::By::open_mpi:
      return "mpirun";
    case Launch::By::pmi:
      return "a launcher of PMI";
    case Launch::By::srun:
      return "srun";
    case Launch::By::allocation:
      return "no launcher, inside a Slurm job";
    case Launch::By::torchrun:
      return "torchrun";
    case Launch::By::nobody:
      break;
  }
  return "no launcher";
}

}  // namespace

LaunchFacts read_launch_facts() {
  LaunchFacts facts;
  const Launch launch = read_launch(variable);
  facts.launcher = name_of(launch.by);
  try {
    check_launch_before_mpi(variable);
  } catch (const UsageError& error) {
    facts.problem = error.what();
  }
  // Open MPI 4 ends a program that srun started without PMIx, one task or many.
  if (facts.problem.empty() && launch.by == Launch::By::srun && !launch.joins)
    facts.problem = "srun started this without PMIx: use srun --mpi=pmix, or mpirun";
  facts.library = mpi_library_version();
  facts.library_file = mapped_file("libmpi.so");
  facts.mpirun = in_path("mpirun");
  return facts;
}

CudaFacts read_cuda(bool is_asked_for) {
  CudaFacts facts;
  facts.is_asked_for = is_asked_for;
  facts.is_built = cuda::is_built();
  facts.nccl = device_communicator_version();
  if (!facts.is_built) return facts;
  facts.driver = cuda::driver_version();
  facts.runtime = cuda::runtime_version();
  facts.problem = cuda::device_problem({Device::Kind::cuda, 0});
  const int count = cuda::device_count();
  for (int i = 0; i < count; ++i) {
    const Device device{Device::Kind::cuda, static_cast<std::int16_t>(i)};
    const cuda::DeviceFacts device_facts = cuda::device_facts(device);
    GpuFacts gpu;
    gpu.ordinal = i;
    gpu.name = cuda::device_name(device);
    gpu.problem = cuda::device_problem(device);
    gpu.uuid = device_facts.uuid;
    gpu.major = device_facts.major;
    gpu.minor = device_facts.minor;
    gpu.ecc = device_facts.ecc;
    gpu.clock_mhz = device_facts.clock_mhz;
    gpu.memory_clock_mhz = device_facts.memory_clock_mhz;
    try {
      const auto memory = cuda::device_memory(device);
      gpu.free = memory.free;
      gpu.total = memory.total;
    } catch (const Error& error) {
      gpu.problem = error.what();
    }
    facts.gpus.push_back(gpu);
  }
  return facts;
}

// Everyone leaves a barrier after the last has entered it, so no exit is further from another's than the longest stay.
ClockFacts measure_clock(Communicator& world) {
  constexpr int kRounds = 8;
  ClockFacts best;
  best.uncertainty_seconds = 1e9;
  for (int round = 0; round < kRounds; ++round) {
    world.barrier();
    const auto entry = std::chrono::steady_clock::now();
    world.barrier();
    const std::chrono::duration<double> stay = std::chrono::steady_clock::now() - entry;
    const std::chrono::duration<double> clock = std::chrono::system_clock::now().time_since_epoch();
    const double mine[2] = {clock.count(), stay.count()};
    double root[2];
    std::string bytes(reinterpret_cast<const char*>(mine), sizeof mine);
    world.broadcast_host(bytes, 0);
    std::memcpy(root, bytes.data(), sizeof root);
    const double uncertainty = std::max(root[1], mine[1]);
    if (uncertainty < best.uncertainty_seconds) best = {mine[0] - root[0], uncertainty};
  }
  return best;
}

}  // namespace moesaic::apps::doctor
