#pragma once
#include <cstddef>
#include <vector>

#include "memory/buffer.h"
#include "memory/stream.h"

namespace moesaic::pipeline {

/// Tensors for bundles in transit, each of them used again and again. First a dry walk takes and releases as a real one
/// will, which finds out how many there must be; then allocate() makes them. Who takes a tensor waits, on its stream, for
/// the last use before.
class BundlePool {
 public:
  explicit BundlePool(Device device) : device_(device) {}

  /// A free tensor of this kind, the first one. `user`: the stream that writes it first; null on the dry walk. Throws
  /// InternalError when a real walk takes more than the dry one.
  int take(const Shape& shape, DType dtype, Stream* user);
  /// `last_use` has been recorded after the last work on the tensor.
  void release(int tensor, const Event& last_use);
  TensorView view(int tensor) const { return entries_[static_cast<std::size_t>(tensor)].view; }

  void allocate();
  std::size_t bytes() const noexcept { return bytes_; }
  bool is_all_free() const noexcept;

 private:
  struct Entry {
    Shape shape;
    DType dtype;
    Event last_use;
    TensorView view;
    bool is_taken = false;
  };
  Device device_;
  std::vector<Entry> entries_;
  std::vector<Buffer> memory_;
  std::size_t bytes_ = 0;
  bool is_allocated_ = false;
};

}  // namespace moesaic::pipeline
