#pragma once
#include <functional>
#include <string>

namespace moesaic {

/// The value of an environment variable, or null.
using EnvironmentLookup = std::function<const char*(const char*)>;

/// What the variables in a process's environment say about who started it.
struct Launch {
  enum class By {
    nobody,      ///< no launcher: one process
    open_mpi,    ///< mpirun of an Open MPI
    pmi,         ///< mpirun of MPICH, Intel MPI, …, or srun --mpi=pmi2
    srun,        ///< a step of Slurm
    allocation,  ///< inside a Slurm job, but not by srun: a batch script, the shell of salloc
    torchrun,
  };
  By by = By::nobody;
  int size = 1;        ///< processes that were started together, or that the allocation is for
  bool joins = false;  ///< variables are there through which MPI can find the other processes
  std::string found;   ///< the variables that say so: "SLURM_STEP_NUM_TASKS=2, SLURM_PROCID=1"
};

/// The innermost launcher counts: an mpirun of 2 inside a Slurm allocation of 8 is an mpirun of 2.
Launch read_launch(const EnvironmentLookup& environment);

/// Before MPI starts. Throws UsageError when this process is one of several that MPI has no means to join (srun without
/// PMIx, a bare process in an allocation for several): each would train alone as rank 0 of 1, or MPI would end the
/// program with a text about its own build. The error names the variables found and the command to use.
void check_launch_before_mpi(const EnvironmentLookup& environment);

/// After MPI has started. Throws UsageError when the launcher's variables say that this process is one of several, or
/// another rank, than MPI says: the sign of a launcher that MPI does not know.
void check_launch(int mpi_rank, int mpi_size, const EnvironmentLookup& environment);

}  // namespace moesaic
