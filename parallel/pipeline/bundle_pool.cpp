#include "parallel/pipeline/bundle_pool.h"

#include <algorithm>

namespace moesaic::pipeline {

int BundlePool::take(const Shape& shape, DType dtype, Stream* user) {
  auto entry = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) {
    return !e.is_taken && e.shape == shape && e.dtype == dtype;
  });
  if (entry == entries_.end()) {
    MOESAIC_CHECK(!is_allocated_, "more bundles in transit than were planned");
    entry = entries_.insert(entries_.end(), {shape, dtype, Event(device_), TensorView()});
    bytes_ += static_cast<std::size_t>(shape.numel()) * byte_size(dtype);
  }
  entry->is_taken = true;
  if (user != nullptr) user->wait(entry->last_use);
  return static_cast<int>(entry - entries_.begin());
}

void BundlePool::release(int tensor, const Event& last_use) {
  Entry& entry = entries_[static_cast<std::size_t>(tensor)];
  MOESAIC_CHECK(entry.is_taken, "a bundle released twice");
  entry.is_taken = false;
  entry.last_use = last_use;
}

void BundlePool::allocate() {
  for (Entry& entry : entries_) {
    const std::size_t bytes =
        static_cast<std::size_t>(entry.shape.numel()) * byte_size(entry.dtype);
    memory_.emplace_back(bytes, device_, "bundles between chunks");
    entry.view = memory_.back().view(entry.shape, entry.dtype);
  }
  is_allocated_ = true;
}

bool BundlePool::is_all_free() const noexcept {
  return std::none_of(entries_.begin(), entries_.end(), [](const Entry& e) { return e.is_taken; });
}

}  // namespace moesaic::pipeline
