#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "memory/tiers/io_queue.h"
#include "memory/tiers/scratch_file.h"

namespace moesaic::tiers {

/// A read or write that the file tier has taken. Copies share it.
class Transfer {
 public:
  Transfer() = default;  ///< of nothing: done
  bool is_done() const;  ///< whether wait() would return (or throw) at once
  /// Blocks the host until the bytes are there. Throws what the transfer failed with, every time it is asked.
  void wait() const;
  struct State;

 private:
  friend class FileTier;
  explicit Transfer(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

/// Records in a file. Transfers run on a thread of their own, in pieces, several at once, in no order among each other.
/// The checksum (CRC-32C) of every section is kept in this process, not in the file: what is read must be what was written
/// last to this very place, so damaged, misplaced and lost writes are all found.
class FileTier {
 public:
  struct Options {
    ScratchFile::Options file;
    std::uint64_t budget_bytes = ~std::uint64_t{0};  ///< ceiling of the file's size
    bool verify_reads = true;                        ///< compare checksums of what is read
    std::uint32_t piece_bytes = 1 << 20;             ///< a multiple of kBlockAlignment
    /// What messages call a record: "layer 3, expert 17".
    std::function<std::string(std::int64_t record)> name;
  };
  struct Counters {
    std::uint64_t bytes_read = 0, bytes_written = 0;  ///< with padding
    std::uint64_t reads = 0, writes = 0;              ///< transfers
    std::uint64_t retries = 0;  ///< requests sent again: interrupted, short, or refused as direct
  };

  /// Makes the file (see ScratchFile for what is thrown). Notes of queue and file are logged, once each. Throws
  /// ResourceError when the records do not fit into the budget.
  FileTier(const RecordLayout& layout, Options options, OpenedQueue queue);
  ~FileTier();  ///< waits for what is in flight, and removes the file
  FileTier(const FileTier&) = delete;
  FileTier& operator=(const FileTier&) = delete;

  /// Moves sections of a record. `image`: the record in host memory, aligned to kBlockAlignment, the sections at their
  /// offsets; what is read or written of it must be left alone until the transfer is done. Padding may be written with
  /// whatever it holds. A section that another transfer in flight writes (or, for a write, reads) may not be in the range,
  /// and only sections that were written can be read: InternalError.
  /// A transfer fails with ResourceError (disk full or failing; file, offset, bytes, what to do) or InputError (wrong
  /// checksum or a file cut short; file, offset, section). A section whose write failed counts as never written.
  Transfer write(std::int64_t record, SectionRange range, const std::byte* image);
  Transfer read(std::int64_t record, SectionRange range, std::byte* image);

  const RecordLayout& layout() const noexcept;
  std::int64_t records() const noexcept;
  bool is_written(std::int64_t record, SectionRange range) const;
  std::uint64_t file_bytes() const noexcept;
  const std::filesystem::path& path() const noexcept;
  std::string_view queue_name() const noexcept;
  /// What could not be had (io_uring, locked memory, O_DIRECT), as logged.
  std::vector<std::string> notes() const;
  Counters counters() const;

 private:
  class Engine;
  std::unique_ptr<Engine> engine_;
};

}  // namespace moesaic::tiers
