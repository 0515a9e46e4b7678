#pragma once
#include <memory>
#include <string>

#include "comm/communicator.h"

namespace moesaic {

/// What the MPI library calls itself: "Open MPI v4.1.4, package: …". Needs no MpiEnvironment.
std::string mpi_library_version();

/// Owns MPI: starts it on the communication thread (which is the only one that ever calls it, level
/// MPI_THREAD_FUNNELED) and ends it. One per process, made before anything that needs ranks.
/// Throws UsageError as check_launch_before_mpi() and check_launch() do (comm/launch_check.h).
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
