#include "apps/stop_requests.h"

#include <atomic>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <string_view>

#include <fmt/format.h>
#include <unistd.h>

#include "core/base/error.h"

namespace moesaic::apps {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::milliseconds kBetweenLooks{
    200};  // at the file: a network file system may be slow
std::atomic<int> caught{0};
bool is_launched =
    false;  // by an MPI launcher; once MPI has started a lone process has its variables, too
fs::file_time_type asked_since =
    fs::file_time_type::min();  // older files were meant for another start
static_assert(std::atomic<int>::is_always_lock_free);

// The clock that files get their times from ticks in milliseconds and lags behind the finer one.
fs::file_time_type file_clock_now() {
  timespec now{};
  MOESAIC_CHECK(clock_gettime(CLOCK_REALTIME_COARSE, &now) == 0, "clock_gettime");
  const auto since_1970 = std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
  return std::chrono::file_clock::from_sys(
      std::chrono::sys_time<std::chrono::nanoseconds>(since_1970));
}

extern "C" void note_signal(int signal) {
  caught.store(signal, std::memory_order_relaxed);
}

void handle(int signal, int flags) {
  struct sigaction action {};
  action.sa_handler = note_signal;
  action.sa_flags = SA_RESTART | flags;
  sigemptyset(&action.sa_mask);
  MOESAIC_CHECK(sigaction(signal, &action, nullptr) == 0, "sigaction");
}

bool is_launched_by_mpi() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"}) {
    if (std::getenv(name) != nullptr) return true;
  }
  return false;
}

// mpirun, when it started this process without a helper in between.
std::optional<long> launcher_process() {
  const long parent = ::getppid();
  std::string name;
  std::getline(std::ifstream(fmt::format("/proc/{}/comm", parent)), name);
  for (const char* launcher : {"mpirun", "mpiexec", "orterun", "prterun"}) {
    if (name == launcher) return parent;
  }
  return std::nullopt;
}

std::int64_t unix_seconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace

std::string to_string(StopReason reason) {
  switch (reason) {
    case StopReason::none:
      break;
    case StopReason::job_end:
      return "the job's time limit (SLURM_JOB_END_TIME) is near";
    case StopReason::max_minutes:
      return "run.max_minutes is over";
    case StopReason::file:
      return "the file 'stop' in run.dir asks for it";
    case StopReason::terminate:
      return "SIGTERM";
    case StopReason::interrupt:
      return "SIGINT";
    case StopReason::user_signal:
      return "SIGUSR1";
  }
  return "no reason";
}

void catch_stop_signals() {
  asked_since = file_clock_now();
  is_launched = is_launched_by_mpi();
  handle(SIGUSR1, 0);
  if (is_launched) return;
  handle(SIGTERM, 0);
  handle(SIGINT, static_cast<int>(SA_RESETHAND));
}

StopReason caught_signal() noexcept {
  switch (caught.load(std::memory_order_relaxed)) {
    case 0:
      return StopReason::none;
    case SIGTERM:
      return StopReason::terminate;
    case SIGINT:
      return StopReason::interrupt;
    default:
      return StopReason::user_signal;
  }
}

std::string how_to_stop(const std::string& run_dir) {
  const std::string file = fmt::format("touch {}", (fs::path(run_dir) / "stop").string());
  if (!is_launched)
    return fmt::format(
        "Ctrl-C once, kill -USR1 {}, or {}: saves and ends with exit code 75", ::getpid(), file);
  const auto mpirun = launcher_process();
  return fmt::format("kill -USR1 {}, or {}: saves and ends with exit code 75; Ctrl-C saves nothing",
                     mpirun ? std::to_string(*mpirun) : "PID_OF_MPIRUN",
                     file);
}

StopReason StopRequests::wish() {
  if (const StopReason signal = caught_signal(); signal != StopReason::none) return signal;
  if (file_is_there()) return StopReason::file;
  if (!step_seconds_) return StopReason::none;
  const std::chrono::duration<double> since = Clock::now() - settings_.start;
  if (settings_.max_minutes && since.count() >= 60 * *settings_.max_minutes)
    return StopReason::max_minutes;
  if (settings_.job_end &&
      static_cast<double>(*settings_.job_end - unix_seconds()) < seconds_needed())
    return StopReason::job_end;
  return StopReason::none;
}

double StopRequests::seconds_needed() const {
  return kMargin + 1.5 * (step_seconds_.value_or(0) +
                          save_seconds_.value_or(settings_.expected_save_seconds));
}

bool StopRequests::file_is_there() {
  if (settings_.file.empty() || Clock::now() < next_look_) return false;
  next_look_ = Clock::now() + kBetweenLooks;
  std::error_code error;
  return fs::exists(settings_.file, error);
}

bool StopRequests::remove_older_file() const {
  if (settings_.file.empty()) return false;
  std::error_code error;
  const auto written = fs::last_write_time(settings_.file, error);
  if (error || written >= asked_since) return false;
  remove_file();
  return true;
}

void StopRequests::remove_file() const {
  if (settings_.file.empty()) return;
  std::error_code error;
  fs::remove(settings_.file, error);
  if (error)
    throw ResourceError(fmt::format("{}: cannot be removed, and would stop the next start too: {}",
                                    settings_.file.string(),
                                    error.message()));
}

std::optional<std::int64_t> job_end_of_environment() {
  const char* value = std::getenv("SLURM_JOB_END_TIME");
  if (value == nullptr || *value == '\0') return std::nullopt;
  const std::string_view text(value);
  std::int64_t end = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), end);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size())
    throw UsageError(fmt::format(
        "SLURM_JOB_END_TIME is '{}', not a number of seconds since 1970; unset it", text));
  if (end <= unix_seconds()) return std::nullopt;
  return end;
}

}  // namespace moesaic::apps
