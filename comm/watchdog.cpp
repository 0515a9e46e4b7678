#include "comm/watchdog.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <ctime>
#include <deque>
#include <fstream>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <semaphore.h>
#include <unistd.h>

#include "comm/hang_verdict.h"
#include "comm/rank_status.h"
#include "comm/status_board.h"
#include "core/base/error.h"

namespace moesaic {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kLastResort = 8;  // seconds from giving up to the end, whatever happens
constexpr std::size_t kRanksInMessage = 16;
constexpr double kStepFactor = 5;

double seconds_since(Clock::time_point then) {
  return std::chrono::duration<double>(Clock::now() - then).count();
}
std::chrono::duration<double> seconds(double s) {
  return std::chrono::duration<double>(s);
}

[[noreturn]] void end_process() {
  ::_exit(static_cast<int>(ExitCode::watchdog));
}

void print(const std::string& text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const ssize_t n = ::write(STDERR_FILENO, text.data() + at, text.size() - at);
    if (n <= 0) return;
    at += static_cast<std::size_t>(n);
  }
}

// A semaphore, because what a signal handler may do to wake a thread is to post one.
class Wake {
 public:
  Wake() { MOESAIC_CHECK(::sem_init(&semaphore_, 0, 0) == 0, "sem_init"); }
  ~Wake() { ::sem_destroy(&semaphore_); }
  Wake(const Wake&) = delete;
  Wake& operator=(const Wake&) = delete;
  void post() { ::sem_post(&semaphore_); }
  /// At most so long (in seconds).
  void wait(double most) {
    timespec until{};
    ::clock_gettime(CLOCK_MONOTONIC, &until);
    const std::int64_t ns = until.tv_nsec + static_cast<std::int64_t>(most * 1e9);
    until.tv_sec += ns / 1'000'000'000;
    until.tv_nsec = ns % 1'000'000'000;
    ::sem_clockwait(&semaphore_, CLOCK_MONOTONIC, &until);
  }

 private:
  sem_t semaphore_{};
};

// A launcher ends the other ranks of a dead one by this signal, and by SIGKILL as little as 40 ms later: the thread that speaks
// is woken at once.
volatile std::sig_atomic_t told_to_end = 0;
std::atomic<Wake*> wake_at_term{nullptr};
void on_term(int) {
  told_to_end = 1;
  if (Wake* wake = wake_at_term) wake->post();
}

// Exchanges statuses with the other ranks. Its thread is the only one that touches files, which may block for ever; whoever
// asks it does so without waiting long.
class Board {
 public:
  Board(const Activity& activity, const Watchdog::Options& options, double beat_s)
      : activity_(activity), options_(options), beat_s_(beat_s) {}
  ~Board() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  void open(const std::filesystem::path& folder, const std::string& life, int ranks) {
    const std::lock_guard lock(mutex_);
    if (thread_.joinable()) return;
    files_.emplace(folder);
    life_ = life;
    others_.resize(static_cast<std::size_t>(ranks));
    thread_ = std::thread([this] { work(); });
  }
  void set_idle(double idle_s, double limit_s) {
    idle_s_ = idle_s;
    limit_s_ = limit_s;
  }
  void set_expired() { expired_ = true; }

  /// True when another rank got on within its limit.
  bool others_get_on() {
    const std::lock_guard lock(mutex_);
    return std::any_of(others_.begin(), others_.end(), [&](const Heard& h) {
      return h.status && seconds_since(h.at) + h.status->idle_s < h.status->limit_s;
    });
  }
  /// Writes and reads once more; false when that takes longer than `patience`, or there is no board.
  bool refresh(double patience) {
    std::unique_lock lock(mutex_);
    if (!files_) return false;
    const auto wanted = rounds_ + (is_busy_ ? 2 : 1);
    hurry_ = true;
    changed_.notify_all();
    return changed_.wait_for(lock, seconds(patience), [&] { return rounds_ >= wanted; });
  }
  std::vector<SeenRank> seen() {
    const std::lock_guard lock(mutex_);
    std::vector<SeenRank> all;
    for (const Heard& h : others_)
      all.push_back({h.status, h.status ? seconds_since(h.at) : 0});
    if (all.empty()) all.resize(static_cast<std::size_t>(options_.rank) + 1);
    all[static_cast<std::size_t>(options_.rank)] = {own(), 0};
    return all;
  }
  std::filesystem::path folder() {
    const std::lock_guard lock(mutex_);
    return files_ ? files_->folder() : std::filesystem::path();
  }

 private:
  struct Heard {
    std::optional<RankStatus> status;
    Clock::time_point at;  // when its beat was first seen
  };

  RankStatus own() const {
    RankStatus s = status_of(activity_);
    s.rank = options_.rank;
    s.life = life_;
    s.beat = beat_;
    s.idle_s = idle_s_;
    s.limit_s = limit_s_;
    s.expired = expired_;
    return s;
  }
  void work() {
    std::unique_lock lock(mutex_);
    while (!closing_) {
      ++beat_;
      const RankStatus status = own();
      const int ranks = static_cast<int>(others_.size());
      is_busy_ = true;
      hurry_ = false;
      lock.unlock();
      files_->write(status);
      std::vector<std::optional<RankStatus>> read;
      if (status.idle_s > beat_s_ || status.expired) {  // else the others' state is no matter
        for (int r = 0; r < ranks; ++r)
          read.push_back(r == status.rank ? std::nullopt : files_->read(r));
      }
      lock.lock();
      hear(read);
      is_busy_ = false;
      ++rounds_;
      changed_.notify_all();
      changed_.wait_for(lock, seconds(beat_s_), [&] { return closing_ || hurry_; });
    }
    lock.unlock();
    files_->remove(options_.rank);
  }
  void hear(const std::vector<std::optional<RankStatus>>& read) {
    for (std::size_t r = 0; r < read.size(); ++r) {
      if (!read[r] || read[r]->life != life_) continue;
      Heard& heard = others_[r];
      if (heard.status && heard.status->beat == read[r]->beat) continue;
      heard = {read[r], Clock::now()};
    }
  }

  const Activity& activity_;
  const Watchdog::Options& options_;
  const double beat_s_;
  std::atomic<double> idle_s_{0}, limit_s_{0};
  std::atomic<bool> expired_{false};
  std::mutex mutex_;  // never held while files are touched
  std::condition_variable changed_;
  std::optional<StatusBoard> files_;
  std::string life_;
  std::vector<Heard> others_;
  std::uint64_t beat_ = 0, rounds_ = 0;
  bool is_busy_ = false, hurry_ = false, closing_ = false;
  std::thread thread_;
};

}  // namespace

struct Watchdog::Impl {
  Impl(const Activity& a, const Options& o)
      : activity(a),
        options(o),
        beat_s(std::clamp(o.limit_s / 8, 0.1, 4.0)),
        board(a, options, beat_s),
        thread([this] { work(); }) {}
  ~Impl() {
    closing = true;
    wake.post();
    thread.join();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  double limit() const {
    if (activity.period.read().is_long) return options.long_limit_s;
    return std::max(options.limit_s, kStepFactor * usual_step);
  }

  void work() {
    const double interval = std::clamp(options.limit_s / 40, 0.02, 0.25);
    const bool takes_term = take_term();
    double idle = 0;
    std::uint64_t counted = 0;
    auto last = Clock::now();
    for (;;) {
      wake.wait(interval);
      if (closing) break;
      if (told_to_end != 0) end_by_term();
      // A long gap is time in which this process was stopped, and its rest, too.
      idle += std::min(seconds_since(last), 4 * interval);
      last = Clock::now();
      const std::uint64_t now = progress_count(activity.period.read().is_long);
      if (now != counted) idle = 0;
      counted = now;
      board.set_idle(idle, limit());
      if (idle < limit() || board.others_get_on()) continue;
      give_up(idle);
    }
    if (!takes_term) return;
    std::signal(SIGTERM, SIG_DFL);
    wake_at_term = nullptr;
  }

  bool take_term() {
    struct sigaction now {};
    if (::sigaction(SIGTERM, nullptr, &now) != 0 || now.sa_handler != SIG_DFL) return false;
    wake_at_term = &wake;
    std::signal(SIGTERM, on_term);
    return true;
  }
  void end_by_term() const {
    const RankStatus own = status_of(activity);
    const auto& awaited = own.exchange.awaited_ranks;
    const bool lost_first = options.rank == 1 && own.exchange.is_moving &&
                            std::find(awaited.begin(), awaited.end(), 0) != awaited.end();
    if (options.rank == 0 || lost_first)
      print(fmt::format(
          "moesaic: rank {} was told to end (SIGTERM) in {}\n", options.rank, describe(own)));
    std::signal(SIGTERM, SIG_DFL);
    ::kill(::getpid(), SIGTERM);
  }

  [[noreturn]] void give_up(double idle) {
    // Files and standard error may be as dead as the rest.
    std::thread([] {
      std::this_thread::sleep_for(seconds(kLastResort));
      end_process();
    }).detach();
    board.set_expired();
    bool is_shared = board.refresh(2);
    if (is_shared) {  // the others come to the same end, and rank 0 of them speaks
      std::this_thread::sleep_for(seconds(std::min(2 * beat_s, 1.5)));
      is_shared = board.refresh(1);
    }
    const std::vector<SeenRank> seen = board.seen();
    if (is_shared && speaker(seen) != options.rank) {
      std::this_thread::sleep_for(seconds(1.5));  // let it speak
      end_process();
    }
    print(is_shared ? message_of_all(seen, idle, kRanksInMessage) : message_of_one(seen, idle));
    if (is_shared) {
      std::ofstream file(board.folder() / "hang.txt");
      file << message_of_all(seen, idle, seen.size());
    }
    end_process();
  }

  double silence() const { return 3 * beat_s + 0.5; }
  int speaker(const std::vector<SeenRank>& seen) const {
    for (const SeenRank& r : seen) {
      if (r.status && r.status->expired && r.silent_s < silence()) return r.status->rank;
    }
    return options.rank;
  }
  std::string message_of_all(const std::vector<SeenRank>& seen,
                             double idle,
                             std::size_t most) const {
    return fmt::format("moesaic: no progress for {:.0f} s: {}\n{}moesaic: {}\n",
                       idle,
                       judge_hang(seen, silence()).text,
                       table_of(seen, silence(), most),
                       options.closing);
  }
  std::string message_of_one(const std::vector<SeenRank>& seen, double idle) const {
    const RankStatus& own = *seen[static_cast<std::size_t>(options.rank)].status;
    return fmt::format("moesaic: rank {} ({}, pid {}): no progress for {:.0f} s: {}\nmoesaic: {}\n",
                       own.rank,
                       own.host,
                       own.pid,
                       idle,
                       describe(own),
                       options.closing);
  }

  const Activity& activity;
  const Options options;
  const double beat_s;
  std::atomic<double> usual_step{0};
  std::deque<double> last_steps;  // main thread
  Board board;
  Wake wake;
  std::atomic<bool> closing{false};
  std::thread thread;  // last: it uses all of the above
};

Watchdog::Watchdog(const Activity& activity, const Options& options)
    : impl_(std::make_unique<Impl>(activity, options)) {}
Watchdog::~Watchdog() = default;

void Watchdog::use_board(const std::filesystem::path& folder,
                         const std::string& life,
                         int rank,
                         int ranks) {
  MOESAIC_CHECK(rank == impl_->options.rank,
                fmt::format("this is rank {} of {}, but the watchdog began as rank {}",
                            rank,
                            ranks,
                            impl_->options.rank));
  impl_->board.open(folder, life, ranks);
}

void Watchdog::step_took(double seconds) {
  constexpr std::size_t kKept = 31;
  auto& steps = impl_->last_steps;
  steps.push_back(seconds);
  if (steps.size() > kKept) steps.pop_front();
  std::vector<double> sorted(steps.begin(), steps.end());
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  impl_->usual_step = *middle;
}

}  // namespace moesaic
