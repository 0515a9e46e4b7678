#pragma once
// What a process is doing, noted while it works and read by its watchdog (comm/watchdog.h) from another thread.
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace moesaic {

/// Counts a piece of work done: a task of a stream, an exchange, a block of a file. What the watchdog takes for a sign of
/// life; costs one relaxed addition. A background thread counts apart, for its work says nothing about the main thread.
void count_progress() noexcept;
/// Pieces of this process so far; `with_background`: those of background threads too.
std::uint64_t progress_count(bool with_background) noexcept;
/// From here on the calling thread is one in the background: a checkpoint's writer.
void count_as_background() noexcept;

/// A value that one thread writes and any other reads, without locks. A reader sees a whole value that was written.
template <class T>
class Published {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Published() { write(T{}); }
  /// The writing thread's own view.
  const T& latest() const noexcept { return value_; }
  /// Writing thread only: `change(T&)`, then everybody sees the result.
  template <class F>
  void update(const F& change) noexcept {
    change(value_);
    publish();
  }
  void write(const T& value) noexcept {
    value_ = value;
    publish();
  }
  /// Any thread.
  T read() const noexcept {
    for (;;) {
      const std::uint64_t before = version_.load(std::memory_order_acquire);
      std::array<std::uint64_t, kWords> words;
      for (std::size_t i = 0; i < kWords; ++i)
        words[i] = words_[i].load(std::memory_order_relaxed);
      std::atomic_thread_fence(std::memory_order_acquire);
      if (before % 2 != 0 || version_.load(std::memory_order_relaxed) != before) continue;
      T value;
      std::memcpy(static_cast<void*>(&value), words.data(), sizeof value);
      return value;
    }
  }

 private:
  static constexpr std::size_t kWords = (sizeof(T) + 7) / 8;
  void publish() noexcept {
    std::array<std::uint64_t, kWords> words{};
    std::memcpy(words.data(), static_cast<const void*>(&value_), sizeof value_);
    const std::uint64_t version = version_.load(std::memory_order_relaxed);
    version_.store(version + 1, std::memory_order_relaxed);  // odd: being written
    std::atomic_thread_fence(std::memory_order_release);
    for (std::size_t i = 0; i < kWords; ++i)
      words_[i].store(words[i], std::memory_order_relaxed);
    version_.store(version + 2, std::memory_order_release);
  }
  T value_{};
  std::array<std::atomic<std::uint64_t>, kWords> words_{};
  std::atomic<std::uint64_t> version_{0};
};

/// Where in a run a process is. Texts are literals.
struct Period {
  const char* name = "start";
  std::int64_t step = 0;  ///< the one that is being made, from 1; 0: none
  bool is_long = true;    ///< may take long without a sign of life: starting, loading, saving
};

/// Where in a step: up to two nested parts, "backward" and "layer 3". Texts are literals.
struct Place {
  struct Part {
    const char* name = "";
    std::int64_t index = -1;  ///< below 0: has none
  };
  std::array<Part, 2> parts{};
  std::int64_t depth = 0;

  void push(const char* name, std::int64_t index) noexcept {
    if (depth < 2) parts[static_cast<std::size_t>(depth)] = {name, index};
    ++depth;
  }
  void pop() noexcept { --depth; }
};

/// One exchange between ranks.
struct Exchange {
  enum class State : std::int32_t {
    none,
    queued,  ///< its turn, but the work that it follows on its stream is not done
    moving,  ///< in the transport
    done,
  };
  const char* operation = "";         ///< "all_reduce"
  std::array<char, 40> group{};       ///< "world", "world/2:1" (color 1 of the second split)
  std::uint64_t number = 0;           ///< among all of this rank, in program order, from 1
  std::uint64_t number_in_group = 0;  ///< the same for all ranks of the group
  std::int64_t bytes = 0;             ///< of this rank's operand
  std::int64_t step = 0;              ///< in which it was issued
  std::int64_t since_ns = 0;          ///< steady clock, when it came into this state
  Place place;                        ///< in which it was issued
  State state = State::none;
  std::int32_t ranks = 0;                       ///< of the group
  std::int32_t awaited = 0;                     ///< ranks from which something is missing
  std::array<std::int32_t, 8> awaited_ranks{};  ///< the first of them, as ranks of the world
};

/// All that the watchdog of a rank looks at. Each part has one writing thread.
struct Activity {
  Published<Period> period;             ///< main thread
  Published<Place> issued;              ///< main thread: what it enqueues
  Published<Place> running;             ///< the CPU stream's worker: what it computes
  Published<Exchange> exchange;         ///< communication thread
  Published<Exchange> device_exchange;  ///< the thread that watches exchanges between devices
};

/// Where the calling thread, the main one of a rank, notes what it is at; null: nowhere.
Activity* activity_of_thread() noexcept;

/// `activity` is that of the calling thread for as long as this lives.
class ActivityOfThread {
 public:
  explicit ActivityOfThread(Activity* activity) noexcept;
  ~ActivityOfThread();
  ActivityOfThread(const ActivityOfThread&) = delete;
  ActivityOfThread& operator=(const ActivityOfThread&) = delete;

 private:
  Activity* before_;
};

/// A period of the main thread, for as long as it lives.
class PeriodScope {
 public:
  /// Nothing when the thread has no Activity.
  PeriodScope(const char* name, bool is_long) noexcept;
  ~PeriodScope();
  PeriodScope(const PeriodScope&) = delete;
  PeriodScope& operator=(const PeriodScope&) = delete;

 private:
  Activity* activity_;
  Period before_;
};

}  // namespace moesaic
