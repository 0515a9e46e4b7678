#pragma once
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/nn/parameter_store.h"
#include "core/train/optimizer.h"

namespace moesaic {

/// How far offloaded experts are behind the steps. A member without a gradient in a step need not be given that step's update
/// before it is used again: what it missed is made up for then, update by update, with a gradient of zeros.
class MemberLag {
 public:
  /// `most`: updates that a member may miss in a row; 0: none.
  MemberLag(const ParameterStore& params, std::int64_t most);

  /// A step is over, and its updates may be made; returns its number, from 0.
  std::int64_t end_step() noexcept { return ++step_; }
  /// What is to be done for this step's updates: members that have a gradient, or may not miss one more.
  std::vector<LateUpdates> of_step(StorageId id);
  /// What is left to do, of the members with rows (none given: of all), once this step's updates of the storage were made.
  std::vector<LateUpdates> behind(StorageId id, std::span<const std::int64_t> rows);

 private:
  /// By member: the first step that it was not given.
  std::vector<std::int64_t>& next_of(StorageId id);
  LateUpdates give(std::int64_t member, std::int64_t& next) const;

  const ParameterStore& params_;
  std::int64_t most_;
  std::int64_t step_ = -1;
  std::unordered_map<std::int32_t, std::vector<std::int64_t>> next_;  ///< by storage
};

}  // namespace moesaic
