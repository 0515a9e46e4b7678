#pragma once
#include <filesystem>
#include <memory>
#include <string>

#include "core/base/activity.h"

namespace moesaic {

/// Ends a rank, and with it the job, when nothing gets on any more: a rank that is stopped, spins or waits for what never
/// comes is noticed by no MPI and no NCCL. One per process; looks from threads of its own at what count_progress() counts
/// and at `activity`, and calls neither MPI nor CUDA, which may hang like the rest.
///
/// A rank gives up when it has not got on for `limit_s` (`long_limit_s` in long periods), and no other rank within its own
/// limit either: on a board that all ranks see, a rank that works on (loads, saves, evaluates) keeps those that wait for it
/// waiting. Without a board each rank goes by itself. Time in which the whole process was stopped (debugger, suspended machine) does not count.
///
/// Told to end by the launcher (SIGTERM, where nobody else has taken it), as all are when one has died, rank 0, or rank 1 if it
/// waits for rank 0, says where it was; then the signal does its work.
///
/// When nothing gets on, one rank prints who is behind and where every rank is, all end with exit code 124, without unwinding, within 10 s.
class Watchdog {
 public:
  struct Options {
    double limit_s = 120;
    double long_limit_s = 600;
    int rank = 0;
    std::string closing;  ///< last line of the message: what to do next
  };
  Watchdog(const Activity& activity, const Options& options);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// From here on `ranks` ranks, of which this is `rank`, meet in `folder`, which exists. `life` tells their job from
  /// earlier ones.
  void use_board(const std::filesystem::path& folder, const std::string& life, int rank, int ranks);
  /// A step is allowed five times as long as the last ones took (their median), if that is more than `limit_s`: on a GPU most
  /// of it passes without a sign of life of the host.
  void step_took(double seconds);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic
