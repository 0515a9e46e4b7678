#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/tensor.h"
#include "parallel/pipeline/schedule.h"

namespace moesaic::pipeline {

struct BundleTensor {
  Shape shape;
  DType dtype = DType::f32;           ///< of the values
  DType gradient_dtype = DType::f32;  ///< of their gradient
  std::int64_t bytes(Payload payload) const;
};

/// What crosses the boundaries between chunks: the running sum `cur`, and the snapshots of the attention residuals that
/// have been taken so far, which every later chunk reads (SPEC 6.6). Shapes are known before anything runs; they are
/// never exchanged.
///
/// A rank keeps the snapshots of a micro-batch until its backward is over, so that a message carries, beside `cur`, only
/// those that no chunk of the receiving rank has seen yet: each snapshot reaches a rank once. Backward is the mirror
/// image: a rank adds up the gradients that all its chunks give a snapshot, and sends the sum with the message that
/// answers the one that brought the snapshot.
class BundlePlan {
 public:
  /// origin_of_snapshot[j]: the chunk that takes snapshot j, in ascending order.
  BundlePlan(const Placement& placement,
             const BundleTensor& cur,
             const BundleTensor& snapshot,
             const std::vector<int>& origin_of_snapshot);

  const BundleTensor& cur() const noexcept { return cur_; }
  const BundleTensor& snapshot() const noexcept { return snapshot_; }
  int num_snapshots() const noexcept { return static_cast<int>(origins_.size()); }
  int origin(int snapshot) const { return origins_[static_cast<std::size_t>(snapshot)]; }
  /// Snapshots 0 … n - 1 exist before, or after, the chunk.
  int snapshots_before(int chunk) const;
  int snapshots_after(int chunk) const { return snapshots_before(chunk + 1); }
  /// The snapshots that a message across the boundary carries, ascending; none when both chunks are on one rank.
  const std::vector<int>& carried(int boundary) const;
  /// Of one micro-batch; 0 when both chunks are on one rank.
  std::int64_t message_bytes(int boundary, Payload payload) const;

 private:
  BundleTensor cur_, snapshot_;
  std::vector<int> origins_;
  std::vector<std::vector<int>> carried_;
  std::vector<bool> is_crossed_;
};

}  // namespace moesaic::pipeline
