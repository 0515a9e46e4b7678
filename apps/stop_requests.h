#pragma once
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "core/config/config.h"

namespace moesaic::apps {

/// Why a run ends before its last step. When ranks differ, the largest counts.
enum class StopReason : std::int64_t {
  none,
  job_end,      ///< SLURM_JOB_END_TIME is near
  max_minutes,  ///< run.max_minutes is over
  file,         ///< RUN_DIR/stop is there
  terminate,    ///< SIGTERM
  interrupt,    ///< SIGINT
  user_signal   ///< SIGUSR1
};
std::string to_string(StopReason reason);

/// From here to the end of the process SIGUSR1 only sets a flag, whatever the process is doing; further ones change
/// nothing. A process that no MPI launcher started takes SIGTERM and the first SIGINT in the same way (a second SIGINT
/// ends it at once); under mpirun those two end a job within about two seconds, too early for a save. Called before MPI
/// starts, so that an early signal is not lost. The file RUN_DIR/stop counts from here on, too.
void catch_stop_signals();
/// The signal that came, or none.
StopReason caught_signal() noexcept;

/// What a user can do to end a run early without losing a step, in one line.
std::string how_to_stop(const std::string& run_dir);

/// Decides, as one rank sees it, whether a run should end before its next step. Signals and the file count at once; time
/// limits only after a step of this process, so that a run that is started again and again always gets on.
class StopRequests {
 public:
  using Clock = std::chrono::steady_clock;
  struct Settings {
    std::filesystem::path file;         ///< RUN_DIR/stop; empty on ranks that do not look for it
    std::optional<double> max_minutes;  ///< since `start`
    Clock::time_point start;
    /// Seconds since 1970 (wall clock) at which the job is killed.
    std::optional<std::int64_t> job_end;
    double expected_save_seconds = 0;  ///< until the first save was timed
  };
  explicit StopRequests(Settings settings) : settings_(std::move(settings)) {}

  /// Removes a file from before catch_stop_signals(), which was meant for another start. Returns whether there was one.
  bool remove_older_file() const;
  StopReason wish();
  void step_took(double seconds) { step_seconds_ = seconds; }
  void save_took(double seconds) { save_seconds_ = seconds; }
  /// Removes the file, so that it does not stop the next start too.
  void remove_file() const;

  /// kMargin + 1.5 x (last step + last save): what must be left before the end of the job to go on.
  double seconds_needed() const;
  static constexpr double kMargin = 30;

 private:
  bool file_is_there();

  Settings settings_;
  std::optional<double> step_seconds_, save_seconds_;
  Clock::time_point next_look_{};
};

/// The value of SLURM_JOB_END_TIME, or nothing when it is not set or has passed (left over from another job). Throws
/// UsageError when it is not a number.
std::optional<std::int64_t> job_end_of_environment();

}  // namespace moesaic::apps
