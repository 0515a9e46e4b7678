#include "parallel/pipeline/bundle.h"

#include <algorithm>

namespace moesaic::pipeline {

std::int64_t BundleTensor::bytes(Payload payload) const {
  const DType type = payload == Payload::activation ? dtype : gradient_dtype;
  return shape.numel() * static_cast<std::int64_t>(byte_size(type));
}

BundlePlan::BundlePlan(const Placement& placement,
                       const BundleTensor& cur,
                       const BundleTensor& snapshot,
                       const std::vector<int>& origin_of_snapshot)
    : cur_(cur), snapshot_(snapshot), origins_(origin_of_snapshot) {
  MOESAIC_CHECK(
      std::is_sorted(origins_.begin(), origins_.end()) &&
          (origins_.empty() || (origins_.front() >= 0 && origins_.back() < placement.num_chunks())),
      "snapshots are taken by chunks, in order");
  for (int boundary = 0; boundary + 1 < placement.num_chunks(); ++boundary) {
    is_crossed_.push_back(placement.is_crossed(boundary));
    carried_.emplace_back();
    if (!is_crossed_.back()) continue;
    // The last chunk before the boundary on the rank that receives; it has seen what was taken up to then.
    int seen = -1;
    for (const int chunk : placement.chunks_of(placement.rank_of(boundary + 1))) {
      if (chunk <= boundary) seen = chunk;
    }
    for (int j = 0; j < num_snapshots(); ++j) {
      if (seen < origin(j) && origin(j) <= boundary) carried_.back().push_back(j);
    }
  }
}

int BundlePlan::snapshots_before(int chunk) const {
  return static_cast<int>(std::lower_bound(origins_.begin(), origins_.end(), chunk) -
                          origins_.begin());
}

const std::vector<int>& BundlePlan::carried(int boundary) const {
  MOESAIC_CHECK(0 <= boundary && static_cast<std::size_t>(boundary) < carried_.size(),
                "no such boundary");
  return carried_[static_cast<std::size_t>(boundary)];
}

std::int64_t BundlePlan::message_bytes(int boundary, Payload payload) const {
  const auto snapshots = static_cast<std::int64_t>(carried(boundary).size());
  if (!is_crossed_[static_cast<std::size_t>(boundary)]) return 0;
  return cur_.bytes(payload) + snapshots * snapshot_.bytes(payload);
}

}  // namespace moesaic::pipeline
