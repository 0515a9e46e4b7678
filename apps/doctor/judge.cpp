#include "apps/doctor/judge.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

namespace moesaic::apps::doctor {
namespace {

constexpr double kMiB = 1024.0 * 1024.0, kGiB = 1024.0 * kMiB;

std::string size_text(std::uint64_t bytes) {
  const auto value = static_cast<double>(bytes);
  return value < 10 * kGiB ? fmt::format("{:.0f} MiB", value / kMiB)
                           : fmt::format("{:.0f} GiB", value / kGiB);
}

std::string version_text(int version) {
  return version == 0 ? "none" : fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

// "Open MPI v4.1.4, package: …" → "Open MPI v4.1.4"
std::string short_name(const std::string& library) {
  return library.substr(0, library.find_first_of(",\n"));
}

Finding judge_gpu(const GpuFacts& gpu) {
  const std::string what = fmt::format("GPU {}", gpu.ordinal);
  const std::string found =
      fmt::format("{}, compute capability {}.{}, {} of {} free, ECC {}, {} MHz (memory {} MHz)",
                  gpu.name,
                  gpu.major,
                  gpu.minor,
                  size_text(gpu.free),
                  size_text(gpu.total),
                  gpu.ecc ? "on" : "off",
                  gpu.clock_mhz,
                  gpu.memory_clock_mhz);
  if (!gpu.problem.empty()) return {Health::fail, what, found, gpu.problem};
  if (static_cast<double>(gpu.free) < 0.9 * static_cast<double>(gpu.total))
    return {Health::warn,
            what,
            found,
            "other processes hold its memory ('nvidia-smi' lists them); a run needs what 'moesaic "
            "plan' says"};
  if (!gpu.ecc)
    return {Health::warn,
            what,
            found,
            "a flipped bit would go unnoticed; 'nvidia-smi -e 1' as root and a restart switch ECC "
            "on, if the device has it"};
  return {Health::ok, what, found, ""};
}

}  // namespace

std::uint64_t shared_memory_needed(int local_ranks, int gpus) {
  const auto ranks = static_cast<std::uint64_t>(std::max({2, local_ranks, gpus}));
  return ranks * (gpus > 0 ? 80u : 16u) << 20;
}

Findings judge_launch(const LaunchFacts& facts, const ProcessFacts& process) {
  Findings findings;
  if (!facts.problem.empty()) {
    findings.push_back({Health::fail, "launch", facts.launcher, facts.problem});
  } else {
    findings.push_back(
        {Health::ok,
         "launch",
         fmt::format(
             "{}; {} rank(s), {} on this machine", facts.launcher, facts.size, facts.local_size),
         ""});
  }
  const std::string library =
      facts.library_file.empty()
          ? short_name(facts.library)
          : fmt::format("{} ({})", short_name(facts.library), facts.library_file);
  if (facts.mpirun.empty()) {
    findings.push_back({Health::warn,
                        "MPI",
                        library + "; no mpirun in PATH",
                        "install the mpirun of this library (Debian, Ubuntu: openmpi-bin), or "
                        "start with 'srun --mpi=pmix'"});
  } else {
    findings.push_back({Health::ok, "MPI", fmt::format("{}; {}", library, facts.mpirun), ""});
  }
  if (process.is_root && !process.mpirun_may_be_root) {
    findings.push_back({Health::warn,
                        "root",
                        "this is root, and mpirun refuses root",
                        "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, or be "
                        "another user"});
  }
  return findings;
}

Findings judge_process(const ProcessFacts& facts, const LaunchFacts& launch) {
  Findings findings;
  const std::string cpus =
      fmt::format("{} of {} processors for this process, {} thread(s) (run.threads)",
                  facts.cpus,
                  facts.machine_cpus,
                  facts.threads);
  if (facts.threads > facts.cpus) {
    findings.push_back(
        {Health::warn,
         "processors",
         cpus,
         fmt::format("threads share processors: give each rank its own with mpirun --map-by "
                     "slot:PE={0} (Slurm: --cpus-per-task={0}), or set run.threads={1}",
                     facts.threads,
                     facts.cpus)});
  } else if (launch.local_size * facts.threads > facts.machine_cpus) {
    findings.push_back(
        {Health::warn,
         "processors",
         fmt::format("{} ranks x {} thread(s) on {} processors",
                     launch.local_size,
                     facts.threads,
                     facts.machine_cpus),
         "ranks take turns on processors; start fewer, or expect a step to take longer"});
  } else {
    findings.push_back({Health::ok, "processors", cpus, ""});
  }
  const std::string blas = facts.openblas_threads.empty()
                               ? "OPENBLAS_NUM_THREADS is not set"
                               : "OPENBLAS_NUM_THREADS=" + facts.openblas_threads;
  if (facts.openblas_threads != "1" && facts.machine_cpus > 1) {
    findings.push_back({Health::warn,
                        "OpenBLAS",
                        blas,
                        "export OPENBLAS_NUM_THREADS=1: moesaic calls it from threads of its own, "
                        "and the library would start others at load"});
  } else {
    findings.push_back({Health::ok, "OpenBLAS", blas, ""});
  }
  return findings;
}

Findings judge_limits(const ProcessFacts& facts) {
  constexpr std::uint64_t kFiles = 1024;
  Findings findings;
  const std::string locked =
      facts.locked_memory ? size_text(*facts.locked_memory) : std::string("unlimited");
  if (facts.locked_memory && facts.has_infiniband) {
    findings.push_back({Health::warn,
                        "locked memory",
                        "ulimit -l " + locked + ", and this machine has RDMA devices",
                        "RDMA pins its buffers and fails at the limit: set memlock to unlimited "
                        "(limits.conf; Slurm: PropagateResourceLimitsExcept=MEMLOCK; containers: "
                        "--ulimit memlock=-1)"});
  } else {
    findings.push_back({Health::ok, "locked memory", "ulimit -l " + locked, ""});
  }
  const std::string files =
      facts.open_files ? std::to_string(*facts.open_files) : std::string("unlimited");
  if (facts.open_files && *facts.open_files < kFiles) {
    findings.push_back({Health::warn,
                        "open files",
                        "ulimit -n " + files,
                        fmt::format("data files, checkpoints and connections between ranks are "
                                    "open at once: ulimit -n {} or more",
                                    4 * kFiles)});
  } else {
    findings.push_back({Health::ok, "open files", "ulimit -n " + files, ""});
  }
  return findings;
}

Findings judge_shared_memory(const SharedMemoryFacts& facts, int local_ranks, int gpus) {
  const std::string what = "shared memory";
  if (!facts.is_there)
    return {{Health::fail,
             what,
             "no /dev/shm",
             "ranks of one machine exchange data there: mount a tmpfs on /dev/shm"}};
  const std::string found =
      fmt::format("/dev/shm {}, {} free", size_text(facts.bytes), size_text(facts.free));
  if (!facts.is_writable)
    return {{Health::fail,
             what,
             found + ", not writable",
             "ranks of one machine exchange data there: chmod 1777 /dev/shm"}};
  const std::uint64_t needed = shared_memory_needed(local_ranks, gpus);
  if (facts.free < needed)
    return {{Health::warn,
             what,
             found,
             fmt::format("{} rank(s) here may need {}, and NCCL or MPI fail without: containers "
                         "need --ipc=host or --shm-size=1g or more; else remove what was left in "
                         "/dev/shm",
                         std::max({2, local_ranks, gpus}),
                         size_text(needed))}};
  return {{Health::ok, what, found, ""}};
}

Findings judge_disk(const DiskFacts& facts) {
  constexpr double kSlow = 0.2;
  const std::string what = "disk";
  if (!facts.problem.empty())
    return {{Health::fail,
             what,
             fmt::format("{}: {}", facts.folder, facts.problem),
             "run.dir must be a folder that this user can write to"}};
  Findings findings;
  const std::string found = fmt::format("{} on {}, {} free, fsync {:.1f} ms, {:.0f} MB/s",
                                        facts.folder,
                                        facts.kind,
                                        size_text(facts.free),
                                        1e3 * facts.fsync_seconds,
                                        facts.bytes_per_second / 1e6);
  if (facts.is_memory) {
    findings.push_back({Health::warn,
                        what,
                        found,
                        "this is memory: checkpoints are gone after a restart of the machine, or "
                        "with the job; choose another run.dir"});
  } else if (facts.is_network) {
    findings.push_back({Health::warn,
                        what,
                        found,
                        "a network file system: the lock against two runs in one run.dir and the "
                        "safety of a checkpoint after a crash are what its server makes of them"});
  } else if (facts.fsync_seconds > kSlow) {
    findings.push_back({Health::warn,
                        what,
                        found,
                        "writing a checkpoint waits for fsync; a local disk is faster"});
  } else {
    findings.push_back({Health::ok, what, found, ""});
  }
  if (facts.checkpoint == 0) return findings;
  // Nothing is removed before the new one is complete.
  const std::uint64_t all =
      facts.checkpoint * static_cast<std::uint64_t>(std::max<std::int64_t>(facts.keep, 1) + 1);
  const std::string need = fmt::format("one checkpoint {}, {} kept and one in the making {}",
                                       size_text(facts.checkpoint),
                                       std::max<std::int64_t>(facts.keep, 1),
                                       size_text(all));
  if (facts.free < facts.checkpoint) {
    findings.push_back(
        {Health::fail, "room", need, "there is no room for one: choose another run.dir"});
  } else if (facts.free < all) {
    findings.push_back({Health::warn,
                        "room",
                        need,
                        "there is no room for all of them: lower checkpoint.keep_last, or choose "
                        "another run.dir"});
  } else {
    findings.push_back({Health::ok, "room", need, ""});
  }
  return findings;
}

Findings judge_cuda(const CudaFacts& facts, const LaunchFacts& launch) {
  const std::string what = "CUDA";
  const Health missing = facts.is_asked_for ? Health::fail : Health::ok;
  if (!facts.is_built)
    return {{missing,
             what,
             "not in this build",
             facts.is_asked_for ? "run.device is cuda: build with -DMOESAIC_CUDA=ON on a machine "
                                  "with nvcc, or use run.device=cpu"
                                : ""}};
  Findings findings;
  const std::string found = fmt::format("driver for CUDA {}, built with {}, {} device(s)",
                                        version_text(facts.driver),
                                        version_text(facts.runtime),
                                        facts.gpus.size());
  if (facts.gpus.empty()) {
    // Built for GPUs, so their absence is worth a word where nobody asked for one, too.
    findings.push_back(
        {facts.is_asked_for ? Health::fail : Health::warn, what, found, facts.problem});
  } else {
    findings.push_back({Health::ok, what, found, ""});
  }
  for (const GpuFacts& gpu : facts.gpus)
    findings.push_back(judge_gpu(gpu));
  if (facts.nccl == "none") {
    const bool several = launch.local_size > 1 || facts.gpus.size() > 1;
    findings.push_back({several && !facts.gpus.empty() ? Health::warn : Health::ok,
                        "NCCL",
                        "not in this build",
                        several ? "several ranks on GPUs need it: install libnccl-dev and build "
                                  "with -DMOESAIC_NCCL=ON"
                                : ""});
  } else {
    findings.push_back({Health::ok, "NCCL", facts.nccl, ""});
  }
  return findings;
}

Findings judge_gpus_of_ranks(const GpusOfRanks& facts, bool is_asked_for) {
  const int gpus = num_different(facts.visible);
  if (gpus == 0) return {};
  const std::string what = "GPU per rank";
  const GpuChoice choice = choose_gpus(facts.visible, false);
  const std::string found =
      fmt::format("{} rank(s), {} different GPU(s)", facts.visible.size(), gpus);
  if (const std::string problem = gpu_choice_problem(facts.visible, choice); !problem.empty())
    return {{is_asked_for ? Health::fail : Health::warn, what, found, problem}};
  if (is_alike_on_machines(facts.visible, facts.hosts))
    return {{Health::ok, what, found + "; each takes one of those of its machine", ""}};
  return {{Health::warn,
           what,
           found + "; each has one, but the ranks of a machine do not see each other's",
           "where Slurm confines ranks to their GPUs, data between them goes through host memory: "
           "use --gpus-per-node instead of --gpus-per-task, or srun --gpu-bind=none"}};
}

Findings judge_clock(const ClockFacts& facts, int rank) {
  constexpr double kFar = 1;
  const double apart = std::abs(facts.offset_seconds) - facts.uncertainty_seconds;
  const std::string found = fmt::format("rank {}'s differs from rank 0's by {:+.3f} s (± {:.3f})",
                                        rank,
                                        facts.offset_seconds,
                                        facts.uncertainty_seconds);
  if (apart > kFar)
    return {
        {Health::warn,
         "clocks",
         found,
         "time limits and logs of ranks disagree: run a time service (chrony) on all machines"}};
  return {{Health::ok, "clocks", "within 1 s of rank 0's", ""}};
}

}  // namespace moesaic::apps::doctor
