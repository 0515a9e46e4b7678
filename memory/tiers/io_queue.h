#pragma once
// Asynchronous reads and writes of an open file, below the file tier. io_uring and threads give the same interface and pass
// the same tests.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace moesaic::tiers {

/// One read or write. `data` stays the queue's until its completion was handed out.
struct IoRequest {
  std::uint64_t tag = 0;  ///< comes back in the completion; different among requests in flight
  bool is_write = false;
  int fd = -1;
  std::byte* data = nullptr;
  std::uint32_t bytes = 0;
  std::uint64_t offset = 0;
};

struct IoCompletion {
  std::uint64_t tag = 0;
  std::int64_t result = 0;  ///< bytes moved (perhaps fewer than asked for), or a negative errno
};

/// Requests in flight, in no order among each other. Used by one thread at a time.
class IoQueue {
 public:
  virtual ~IoQueue() = default;
  virtual std::string_view name() const noexcept = 0;  ///< "io_uring", "threads"
  virtual int depth() const noexcept = 0;              ///< most requests in flight
  /// Starts a request; fewer than depth() may be in flight.
  virtual void submit(const IoRequest& request) = 0;
  /// Blocks until a request in flight has completed, and returns all that have. At least one must be in flight.
  virtual std::vector<IoCompletion> wait() = 0;
};

enum class IoKind : std::uint8_t {
  automatic,  ///< io_uring where build and kernel have it, else threads
  uring,      ///< io_uring, or an error
  threads,    ///< pread and pwrite by a few threads
};

using Memory = std::span<std::byte>;

struct OpenedQueue {
  std::unique_ptr<IoQueue> queue;
  std::vector<std::string> notes;  ///< what could not be had, why, and what to do; a sentence each
};

/// `fixed`: memory that most requests lie in; io_uring keeps it mapped where the limit of locked memory allows (`ulimit
/// -l`), else does without and notes it. Throws ResourceError (cause, what to do) with IoKind::uring where there is none.
OpenedQueue open_io_queue(IoKind kind, int depth, const std::vector<Memory>& fixed = {});

/// pread and pwrite by `depth` threads.
std::unique_ptr<IoQueue> make_thread_queue(int depth);

/// Through io_uring; the queue is null where that cannot be used, and the first note says why.
OpenedQueue try_uring_queue(int depth, const std::vector<Memory>& fixed);

}  // namespace moesaic::tiers
