#pragma once
// The thread behind FileTier: cuts transfers into pieces, keeps the queue full, sends again what came back short.
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>

#include "memory/tiers/file_tier.h"

namespace moesaic::tiers {

/// What a transfer failed with. Not an exception yet: that belongs to the thread that throws it.
struct Failure {
  bool is_input = false;  ///< InputError, else ResourceError
  std::string text;
};

struct Transfer::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::optional<Failure> failure;
};

class FileTier::Engine {
 public:
  Engine(const RecordLayout& layout, Options options, OpenedQueue queue);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  Transfer start(bool is_write, std::int64_t record, SectionRange range, std::byte* image);
  bool is_written(std::int64_t record, SectionRange range) const;
  std::vector<std::string> notes() const;
  Counters counters() const;

  const RecordLayout layout;
  const Options options;

 private:
  friend class FileTier;
  /// What is known of a section in the file.
  struct SectionEntry {
    std::uint32_t crc = 0;
    bool written = false;
    bool writing = false;
    std::uint16_t readers = 0;
  };
  struct Job {
    std::shared_ptr<Transfer::State> state;
    bool is_write = false;
    std::int64_t record = 0;
    SectionRange range;
    std::byte* image = nullptr;
    std::uint64_t sent = 0, extent = 0;  ///< bytes of the range
    int in_flight = 0;
    std::vector<std::uint32_t> crcs;  ///< of a write, by section of the range
    std::optional<Failure> failure;
  };
  /// What is still to be moved of a piece.
  struct Piece {
    Job* job = nullptr;
    std::uint64_t at = 0;  ///< in the range
    std::uint32_t bytes = 0;
    int tries = 0;
    bool was_direct = false;
  };

  void work() noexcept;
  void fill();
  void submit(std::size_t slot);
  void handle(const IoCompletion& completion);
  void again(std::size_t slot);
  void fail(Piece& piece, int error);
  void put_away(std::size_t slot);
  void close(Job& job);
  std::optional<Failure> verify(const Job& job) const;
  void past_page_cache(const Piece& piece) const;
  std::uint64_t file_offset(const Job& job, std::uint64_t at) const;
  std::string place(const Job& job, std::uint64_t at) const;
  SectionEntry& entry(std::int64_t record, int section);
  const SectionEntry& entry(std::int64_t record, int section) const;

  ScratchFile file_;
  std::unique_ptr<IoQueue> queue_;
  std::vector<std::string> notes_;

  mutable std::mutex mutex_;  // of all below; `slots_`, `active_` and the file belong to the thread
  std::condition_variable changed_;
  std::deque<std::unique_ptr<Job>> arrived_;
  std::vector<SectionEntry> entries_;
  Counters counters_;
  bool closing_ = false;

  std::vector<std::unique_ptr<Job>> active_;
  std::vector<Piece> slots_;
  std::vector<std::size_t> free_slots_;
  std::thread thread_;
};

}  // namespace moesaic::tiers
