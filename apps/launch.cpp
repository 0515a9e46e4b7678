#include "apps/launch.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <optional>
#include <string>
#include <thread>

#include <fmt/format.h>

#include "apps/failure.h"
#include "comm/launch_check.h"
#include "comm/mpi_environment.h"
#include "core/base/error.h"

namespace moesaic::apps {

int launcher_rank() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"}) {
    if (const char* value = std::getenv(name); value != nullptr && *value != '\0')
      return std::atoi(value);
  }
  return 0;
}

bool is_the_one_process(const std::string& verb) {
  const Launch launch = read_launch([](const char* name) { return std::getenv(name); });
  const bool is_one_of_several =
      launch.size > 1 && launch.by != Launch::By::nobody && launch.by != Launch::By::allocation;
  if (!is_one_of_several) return true;
  if (launcher_rank() != 0) return false;
  std::cerr << fmt::format("moesaic: '{}' runs in one process: rank 0 of {} does it ({})",
                           verb,
                           launch.size,
                           launch.found)
            << std::endl;
  return true;
}

int run_before_mpi(const std::function<void()>& prepare) {
  try {
    prepare();
    return 0;
  } catch (...) {
    const Failure failure = describe_failure(std::current_exception());
    if (launcher_rank() == 0) std::cerr << failure.text() << std::endl;
    return failure.code;
  }
}

int ranks_per_node(const config::Config& config, const RankPlace& place) {
  if (config.comm.ranks_per_node) return static_cast<int>(*config.comm.ranks_per_node);
  const int here = place.local_size;
  const bool fits = place.world.rank() % here == place.local_rank && place.world.size() % here == 0;
  const auto least = place.world.all_reduce_host(std::int64_t{fits ? here : 0}, ReduceOp::min),
             most = place.world.all_reduce_host(std::int64_t{here}, ReduceOp::max);
  // A rank that counts as a node of its own is right for any placement.
  return least == most ? here : 1;
}

std::unique_ptr<Watchdog> make_watchdog(const config::CommConfig& comm,
                                        const Activity& activity,
                                        const std::string& closing) {
  if (comm.watchdog_s == 0) return nullptr;
  return std::make_unique<Watchdog>(
      activity,
      Watchdog::Options{.limit_s = comm.watchdog_s,
                        .long_limit_s = std::max(comm.watchdog_s, comm.first_step_s),
                        .rank = launcher_rank(),
                        .closing = closing});
}

int run_ranks(const CommOptions& options, const std::function<int(const RankPlace&)>& body) {
  std::optional<MpiEnvironment> started;
  try {
    started.emplace(options);
  } catch (const UsageError& error) {
    // A launch that MPI does not know is N processes that all believe to be alone: by the launcher's count, one speaks.
    const bool several =
        read_launch([](const char* name) -> const char* { return std::getenv(name); }).size > 1;
    if (launcher_rank() == 0 || !several) std::cerr << "moesaic: " << error.what() << std::endl;
    return static_cast<int>(error.exit_code());
  }
  MpiEnvironment& mpi = *started;
  try {
    return body({mpi.world(), mpi.local_rank(), mpi.local_size(), mpi.library_version()});
  } catch (...) {
    const Failure failure = describe_failure(std::current_exception());
    if (mpi.size() == 1) {
      std::cerr << failure.text() << std::endl;
      return failure.code;
    }
    // abort() prints the message. When all ranks fail alike, rank 0 speaks and ends the others while they wait here.
    if (mpi.rank() != 0) std::this_thread::sleep_for(std::chrono::seconds(2));
    mpi.world().abort(failure.code, failure.what);
    return failure.code;
  }
}

}  // namespace moesaic::apps
