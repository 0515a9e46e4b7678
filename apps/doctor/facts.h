#pragma once
// What `doctor` looks at. Reading (read_*.cpp) and judging (judge.h) are apart, so that judging is a pure function.
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "apps/gpu_choice.h"

namespace moesaic::apps::doctor {

/// Bytes or a count; nothing: no limit.
using Limit = std::optional<std::uint64_t>;

/// A process, and the limits it runs under.
struct ProcessFacts {
  bool is_root = false;
  bool mpirun_may_be_root = false;  ///< both OMPI_ALLOW_RUN_AS_ROOT variables are set
  int cpus = 1;                     ///< that this process may run on
  int machine_cpus = 1;
  int threads = 1;               ///< run.threads
  std::string openblas_threads;  ///< OPENBLAS_NUM_THREADS; empty: not set
  Limit locked_memory;           ///< ulimit -l
  Limit open_files;              ///< ulimit -n, the soft one
  bool has_infiniband = false;   ///< the machine has RDMA devices
};

struct SharedMemoryFacts {
  bool is_there = false;
  bool is_writable = false;
  std::uint64_t bytes = 0, free = 0;
};

struct DiskFacts {
  std::string wanted;   ///< run.dir
  std::string folder;   ///< it, or its nearest parent that exists
  std::string problem;  ///< why nothing can be written there; empty: it can
  std::string kind;     ///< "ext4", "nfs", …, or a number in hexadecimal
  bool is_network = false;
  bool is_memory = false;
  std::uint64_t free = 0;
  double fsync_seconds = 0;      ///< of a small file, the median of some
  double bytes_per_second = 0;   ///< written and fsynced
  std::uint64_t checkpoint = 0;  ///< bytes of one, estimated; 0: no configuration was given
  std::int64_t keep = 1;         ///< how many are kept
};

/// What experts.offload will ask of the machine; budgets are those of a rank.
struct OffloadFacts {
  bool on_gpu = false;
  std::optional<std::uint64_t> host_budget, available;  ///< available: by the system's count
  std::uint64_t file_budget = 0;
  std::optional<DiskFacts> disk;  ///< of memory.file_path, with a file tier
};

/// What `plan` says of the memory of a run: bytes of the rank that needs most of each.
struct MemoryPlanFacts {
  int ranks = 1;
  std::uint64_t device = 0, host = 0, file = 0;
  std::uint64_t context =
      0;  ///< of `device`: what a GPU's driver takes, and has taken when `free` is read
  bool on_gpu = false;
  std::string shortage;                 ///< why the run does not start; empty: see the next
  std::optional<std::uint64_t> budget;  ///< memory.device_budget
  std::optional<std::uint64_t>
      free;  ///< of the GPU with the least; without GPU of the machine, for a rank
};

struct GpuFacts {
  int ordinal = 0;
  std::string name, problem;  ///< problem: why this build cannot use it
  std::string uuid;
  int major = 0, minor = 0;  ///< compute capability
  bool ecc = false;
  int clock_mhz = 0, memory_clock_mhz = 0;
  std::uint64_t free = 0, total = 0;
};

struct CudaFacts {
  bool is_built = false;
  int driver = 0, runtime = 0;  ///< 12040 is 12.4; 0: none
  std::string problem;          ///< of device 0: why CUDA cannot be used
  bool is_asked_for = false;    ///< run.device: cuda
  std::vector<GpuFacts> gpus;
  std::string nccl;  ///< "2.28.3", or "none"
};

/// By rank.
struct GpusOfRanks {
  std::vector<std::string> hosts;
  VisibleGpus visible;
};

struct LaunchFacts {
  std::string launcher;      ///< "mpirun", "srun", "no launcher", …
  std::string problem;       ///< why ranks would not meet; empty: they do
  std::string library;       ///< what the MPI library calls itself
  std::string library_file;  ///< the file it was loaded from
  std::string mpirun;        ///< in PATH; empty: none
  int rank = 0, size = 1, local_rank = 0, local_size = 1;
};

/// A rank's clock against rank 0's.
struct ClockFacts {
  double offset_seconds = 0;
  double uncertainty_seconds = 0;
};

}  // namespace moesaic::apps::doctor
