#pragma once
#include <functional>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "comm/watchdog.h"
#include "core/config/config.h"

namespace moesaic::apps {

/// Rank of this process by the launcher's environment variables (Open MPI, PMIx, PMI, Slurm), 0 without a launcher.
int launcher_rank();

/// For verbs that have no ranks to share their work: whether this process does it. Of several that a launcher has started
/// rank 0 does, and says so on standard error.
bool is_the_one_process(const std::string& verb);

/// A rank of a job, and where it runs.
struct RankPlace {
  Communicator& world;  ///< all ranks, for host memory
  int local_rank = 0;   ///< among the ranks of this machine
  int local_size = 1;
  std::string mpi_version = {};  ///< "Open MPI v4.1.4", in the words of the library
};

/// Consecutive ranks that share a machine: comm.ranks_per_node, or as many as MPI finds; 1 when not all machines have
/// equally many, or the ranks of one are not consecutive. All ranks call it.
int ranks_per_node(const config::Config& config, const RankPlace& place);

/// Runs `body` on all ranks of an MPI job and returns its exit code. An error on one rank ends all ranks with that
/// error's exit code and one message: rank 0's, or another rank's when rank 0 stays silent for two seconds. A launcher
/// that MPI does not know is refused with exit code 2 (comm/launch_check.h).
int run_ranks(const CommOptions& options, const std::function<int(const RankPlace&)>& body);

/// Made before MPI starts, to be there until after it has ended: both may wait for ever. Null when comm.watchdog_s is 0.
/// `closing`: the last line of its message, what to do next.
std::unique_ptr<Watchdog> make_watchdog(const config::CommConfig& comm,
                                        const Activity& activity,
                                        const std::string& closing);

/// Runs `prepare` before MPI starts; its errors are printed by rank 0 alone. Returns an exit code, 0 = go on.
int run_before_mpi(const std::function<void()>& prepare);

}  // namespace moesaic::apps
