#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "memory/buffer.h"
#include "memory/tiers/io_queue.h"

namespace moesaic::tiers {

/// Equal slots of host memory, all allocated at the start: pinned for a GPU, ordinary memory for the CPU backend. Slots are
/// aligned to kBlockAlignment, so that direct I/O reaches them. Used by one thread.
class HostPool {
 public:
  struct Options {
    std::uint64_t slot_bytes = 0;  ///< a multiple of kBlockAlignment
    std::int64_t slots = 0;
    std::uint64_t budget_bytes = ~std::uint64_t{0};  ///< hard ceiling of what is allocated
    Device device = kCpu;                            ///< whose copies the memory is for
    std::string tag = "host tier";
    std::uint64_t chunk_bytes = std::uint64_t{1}
                                << 30;  ///< of one allocation, or one slot if that is larger
    bool poison = false;                ///< fills slots that are given back with NaNs (tests)
  };
  /// Throws ResourceError: over the budget, or the system gives less (with the number reached, and the limits to raise).
  explicit HostPool(Options options);

  /// What `slots` slots allocate, with the rests of chunks and the alignment.
  static std::uint64_t bytes_for(const Options& options);

  std::byte* take();  ///< null when all are taken
  void give_back(std::byte* slot);
  std::int64_t slots() const noexcept { return options_.slots; }
  std::int64_t free_slots() const noexcept { return static_cast<std::int64_t>(free_.size()); }
  /// All of the memory, for IoQueue to keep mapped.
  const std::vector<Memory>& regions() const noexcept { return regions_; }

 private:
  Options options_;
  std::vector<Buffer> chunks_;
  std::vector<Memory> regions_;
  std::vector<std::byte*> free_;
  std::vector<std::byte*> taken_;  ///< sorted
};

}  // namespace moesaic::tiers
