#pragma once
#include <functional>
#include <memory>
#include <string>

#include "comm/communicator.h"

namespace moesaic {

/// The value of an environment variable, or null.
using EnvironmentLookup = std::function<const char*(const char*)>;

/// Throws UsageError when the launcher's variables (Open MPI, PMI, PMIx, Slurm) say that this
/// process is one of several, or another rank, than MPI says: the sign of a launcher that MPI does
/// not know, where N processes would each train alone as "rank 0 of 1".
void check_launch(int mpi_rank, int mpi_size, const EnvironmentLookup& environment);

/// Owns MPI: starts it on the communication thread (which is the only one that ever calls it, level
/// MPI_THREAD_FUNNELED) and ends it. One per process, made before anything that needs ranks.
/// Throws UsageError as check_launch() does.
class MpiEnvironment {
 public:
  explicit MpiEnvironment(const CommOptions& options = {});
  /// MPI_Finalize; all ranks must get here. While an exception unwinds several ranks it is left
  /// out.
  ~MpiEnvironment();
  MpiEnvironment(const MpiEnvironment&) = delete;
  MpiEnvironment& operator=(const MpiEnvironment&) = delete;

  int rank() const noexcept;
  int size() const noexcept;
  int local_rank() const noexcept;  ///< among the ranks that share this machine's memory
  int local_size() const noexcept;
  std::string library_version() const;
  /// All ranks; valid while this object lives. Moves host memory.
  Communicator& world() noexcept;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic
