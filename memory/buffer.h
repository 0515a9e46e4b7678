#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/base/tensor.h"

namespace moesaic {

class Stream;

enum class MemoryKind : std::uint8_t { device, pinned_host, pageable_host };

/// Owns one allocation on `device`. Move-only; freed exactly once; every byte is charged to `tag`, so that the memory
/// table and an out-of-memory message can name the culprit. CPU memory is 64-byte aligned and zeroed.
/// Throws ResourceError (tag, bytes) when the allocation fails.
class Buffer {
 public:
  Buffer() = default;
  Buffer(std::size_t bytes,
         Device device,
         const std::string& tag,
         MemoryKind kind = MemoryKind::device);
  /// Nothing is allocated or charged: views look real and are never read. For dry runs, which find out what a run needs.
  static Buffer pretend(std::size_t bytes, Device device);
  std::byte* data() const noexcept;
  std::size_t bytes() const noexcept;
  Device device() const noexcept;
  /// A view of `shape` at byte `offset`.
  TensorView view(Shape shape, DType dtype, std::size_t offset = 0) const;

  struct Block;

 private:
  std::shared_ptr<Block> block_;
};

/// Host memory for what is copied to or from `device`: pinned for a GPU, so that the copies need not wait.
Buffer make_host_buffer(std::size_t bytes, Device device, const std::string& tag);

struct MemoryUse {
  std::string tag;
  std::size_t bytes = 0;
};
/// What is allocated now, by tag, largest first.
std::vector<MemoryUse> memory_in_use();

/// A stack of memory for one purpose (scratch of a stream, replayed activations, …). `Mark` gives everything taken after
/// it back. An arena is built either to measure (views point nowhere; only the high-water mark counts) or with the
/// capacity that a measuring run found. Running out is a ResourceError that names arena and tag, never a new allocation.
class Arena {
 public:
  static Arena measuring(Device device, std::string name);
  Arena(std::size_t capacity, Device device, const std::string& name);

  /// Uninitialised memory, 256-byte aligned, valid until the enclosing Mark ends.
  TensorView take(Shape shape, DType dtype, const char* tag);
  std::size_t high_water_bytes() const noexcept { return high_water_; }
  std::size_t capacity() const noexcept { return capacity_; }
  bool is_measuring() const noexcept { return measuring_; }
  Device device() const noexcept { return device_; }
  /// Fills all memory that is not taken with a NaN pattern (tests: nobody may read what nobody wrote). Host memory only,
  /// at once: no stream may be at work in the arena.
  void poison() noexcept;
  /// The same in the order of the stream that works in the arena, on any device: work enqueued before still finds its
  /// temporaries, work enqueued later finds the pattern.
  void poison(Stream& stream);

  class Mark {
   public:
    explicit Mark(Arena& arena) noexcept : arena_(arena), top_(arena.top_) {}
    ~Mark() { arena_.top_ = top_; }
    Mark(const Mark&) = delete;
    Mark& operator=(const Mark&) = delete;

   private:
    Arena& arena_;
    std::size_t top_;
  };

 private:
  Arena(Device device, std::string name, bool measuring)
      : device_(device), name_(std::move(name)), measuring_(measuring) {}
  Buffer backing_;
  Device device_;
  std::string name_;
  std::size_t capacity_ = 0;
  std::size_t top_ = 0;
  std::size_t high_water_ = 0;
  bool measuring_ = false;
};

}  // namespace moesaic
