#include "comm/launch_check.h"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <initializer_list>
#include <optional>

#include <fmt/format.h>

#include "core/base/error.h"

namespace moesaic {
namespace {

bool is_set(const EnvironmentLookup& environment, const char* variable) {
  const char* text = environment(variable);
  return text != nullptr && *text != '\0';
}

std::optional<int> number_of(const EnvironmentLookup& environment, const char* variable) {
  if (!is_set(environment, variable)) return std::nullopt;
  char* end = nullptr;
  const long value = std::strtol(environment(variable), &end, 10);
  if (*end != '\0' || value < 0 || value > INT_MAX) return std::nullopt;
  return static_cast<int>(value);
}

/// "A=1, B=2" of those that are set.
std::string list_of(const EnvironmentLookup& environment,
                    std::initializer_list<const char*> variables) {
  std::string text;
  for (const char* variable : variables) {
    if (!is_set(environment, variable)) continue;
    text += fmt::format("{}{}={}", text.empty() ? "" : ", ", variable, environment(variable));
  }
  return text;
}

/// What happened, for a reader who knows how the program was started but not why that is wrong.
std::string story(const Launch& launch) {
  switch (launch.by) {
    case Launch::By::open_mpi:
      return fmt::format(
          "an mpirun started this process as one of {}, but it is not the mpirun of the MPI "
          "library that moesaic was built with",
          launch.size);
    case Launch::By::pmi:
      return fmt::format(
          "a launcher that moesaic's Open MPI does not understand (mpirun of MPICH or Intel MPI, "
          "srun --mpi=pmi2, …) started this process as one of {}",
          launch.size);
    case Launch::By::srun:
      return fmt::format("srun started this process as one of {}, without PMIx", launch.size);
    case Launch::By::allocation:
      return fmt::format(
          "this is a single process, started by no launcher, inside a Slurm allocation for {} "
          "tasks",
          launch.size);
    case Launch::By::torchrun:
      return fmt::format("torchrun started this process as one of {}; moesaic uses MPI",
                         launch.size);
    case Launch::By::nobody:
      break;
  }
  return "the launcher's variables contradict each other";
}

[[noreturn]] void refuse(const Launch& launch, const std::string& seen) {
  const bool alone = launch.by == Launch::By::allocation;
  throw UsageError(fmt::format(
      "launch: {}.\n"
      "  found:  {}; {}\n"
      "  effect: {}\n"
      "  start:  mpirun -np {} moesaic train CONFIG …             (the mpirun that belongs to "
      "moesaic's MPI; also in a batch script)\n"
      "          srun --mpi=pmix -n {} moesaic train CONFIG …     (under Slurm; 'srun --mpi=list' "
      "must name pmix)\n"
      "          mpirun -np 1 moesaic train CONFIG …             (one process is what you want)\n"
      "  'moesaic doctor' shows which MPI this is; docs/slurm.md has batch scripts.",
      story(launch),
      launch.found,
      seen,
      alone ? "it would train alone, while the rest of the allocation waits"
            : fmt::format("{} processes would each train alone as rank 0 of 1", launch.size),
      launch.size,
      launch.size));
}

}  // namespace

Launch read_launch(const EnvironmentLookup& environment) {
  struct Sign {
    Launch::By by;
    const char* size;
    std::initializer_list<const char*> shown;
  };
  // Inner launchers first.
  static const Sign kSigns[] = {
      {Launch::By::open_mpi,
       "OMPI_COMM_WORLD_SIZE",
       {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"}},
      {Launch::By::pmi, "PMI_SIZE", {"PMI_SIZE", "PMI_RANK"}},
      {Launch::By::srun,
       "SLURM_STEP_NUM_TASKS",
       {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_ID", "PMIX_RANK"}},
      {Launch::By::allocation, "SLURM_NTASKS", {"SLURM_JOB_ID", "SLURM_NTASKS", "PMIX_RANK"}},
  };
  Launch launch;
  for (const char* variable : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PMI_FD"})
    launch.joins = launch.joins || is_set(environment, variable);
  for (const Sign& sign : kSigns) {
    const auto size = number_of(environment, sign.size);
    if (!size || *size == 0) continue;
    launch.by = sign.by;
    launch.size = *size;
    launch.found = list_of(environment, sign.shown);
    return launch;
  }
  // WORLD_SIZE alone is a name that many systems set.
  if (const auto size = number_of(environment, "WORLD_SIZE");
      size && *size > 0 && is_set(environment, "TORCHELASTIC_RUN_ID")) {
    launch.by = Launch::By::torchrun;
    launch.size = *size;
    launch.found = list_of(environment, {"WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID"});
  }
  return launch;
}

void check_launch_before_mpi(const EnvironmentLookup& environment) {
  const Launch launch = read_launch(environment);
  if (launch.size > 1 && !launch.joins)
    refuse(launch, "none of OMPI_COMM_WORLD_RANK, PMIX_RANK, PMI_RANK");
}

void check_launch(int mpi_rank, int mpi_size, const EnvironmentLookup& environment) {
  Launch launch = read_launch(environment);
  // Slurm counts per component of a heterogeneous job, so MPI may rightly see more. Without a size the launcher may still
  // have given a rank; then only that is compared.
  const bool slurm = launch.by == Launch::By::srun || launch.by == Launch::By::allocation;
  const bool is_wrong = slurm ? launch.size > mpi_size : launch.size != mpi_size;
  if (launch.by != Launch::By::nobody && is_wrong)
    refuse(launch, fmt::format("MPI sees rank {} of {}", mpi_rank, mpi_size));
  for (const char* variable : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"}) {
    const auto rank = number_of(environment, variable);
    if (!rank) continue;
    if (*rank != mpi_rank) {
      launch.size = std::max(launch.size, *rank + 1);
      launch.found = list_of(environment, {variable});
      refuse(launch, fmt::format("MPI sees rank {} of {}", mpi_rank, mpi_size));
    }
    break;
  }
}

}  // namespace moesaic
