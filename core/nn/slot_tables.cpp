#include "core/nn/slot_tables.h"

#include <algorithm>

#include "core/base/error.h"

namespace moesaic {

std::size_t SlotTables::bytes_for(std::int64_t length, std::int64_t tables) {
  return static_cast<std::size_t>(length * tables) * byte_size(DType::i32);
}

SlotTables::SlotTables(std::int64_t length, std::int64_t tables, Device device)
    : length_(length),
      host_memory_(make_host_buffer(bytes_for(length, tables), device, "expert slot tables, host")),
      device_memory_(bytes_for(length, tables), device, "expert slot tables"),
      host_(host_memory_.view({tables, length}, DType::i32)),
      device_(device_memory_.view({tables, length}, DType::i32)) {
  for (std::int64_t i = 0; i < tables; ++i) {
    copied_.emplace_back(device);
    used_.emplace_back(device);
  }
}

ConstTensorView SlotTables::put(std::span<const std::int32_t> slots, Stream& stream) {
  const auto n = static_cast<std::int64_t>(slots.size());
  MOESAIC_CHECK(n > 0 && n <= length_, "a table of slots");
  const std::int64_t table = next_++ % host_.dim(0);
  Event& copied = copied_[static_cast<std::size_t>(table)];
  if (!copied.reached()) copied.wait_on_host();
  const auto view = [&](const TensorView& all) {
    return all.rows(table, table + 1).reshaped({length_}).rows(0, n);
  };
  std::copy(slots.begin(), slots.end(), view(host_).as<std::int32_t>());
  stream.wait(used_[static_cast<std::size_t>(table)]);
  copy_tensor(view(device_), view(host_), stream);
  stream.record(copied);
  return view(device_);
}

void SlotTables::used(const ConstTensorView& table, Stream& stream) {
  const auto index = (table.data() - device_.data()) /
                     (length_ * static_cast<std::int64_t>(byte_size(DType::i32)));
  stream.record(used_[static_cast<std::size_t>(index)]);
}

}  // namespace moesaic
