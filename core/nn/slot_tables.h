#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/base/tensor.h"
#include "memory/buffer.h"
#include "memory/stream.h"

namespace moesaic {

/// Tables of slots for kernels, a ring of them in pinned host memory and on the device. A table lives until the ring has come
/// round and the work that reads it is done.
class SlotTables {
 public:
  /// `length`: of the longest table.
  SlotTables(std::int64_t length, std::int64_t tables, Device device);
  static std::size_t bytes_for(std::int64_t length, std::int64_t tables);

  /// Copies a table, i32 [slots.size()], in the order of `stream`. Waits on the host when all tables are on their way.
  ConstTensorView put(std::span<const std::int32_t> slots, Stream& stream);
  /// The work that reads the table was enqueued.
  void used(const ConstTensorView& table, Stream& stream);
  std::size_t bytes() const noexcept { return device_memory_.bytes(); }

 private:
  std::int64_t length_, next_ = 0;
  Buffer host_memory_, device_memory_;
  TensorView host_, device_;
  std::vector<Event> copied_, used_;
};

}  // namespace moesaic
