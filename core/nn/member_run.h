#pragma once
#include <cstdint>
#include <functional>
#include <span>

#include "core/base/tensor.h"
#include "memory/tiers/visits.h"

namespace moesaic {

/// Some members of a family, next to each other, whose slots of a storage are on the device at once.
struct MemberRun {
  std::int64_t begin = 0,
               end = 0;  ///< members of this rank; those behind the last one are slots for copies
  TensorView slots;      ///< [slots, rows, cols]: weights (only read), or gradients (added to)
  ConstTensorView slot_of_member;  ///< i32 [end - begin]; of members without rows any slot
};

/// A pass over the members of a storage.
struct MemberVisit {
  /// forward and backward of training follow the schedule of the step; what does not is `outside` of it (evaluation).
  tiers::VisitKind kind = tiers::VisitKind::forward;
  bool outside = false;
  std::int32_t micro_batch = 0;  ///< number on this rank, from 0
  /// By member: rows that it gets. Those without rows are passed over. Empty: the host does not know; all are brought.
  std::span<const std::int64_t> rows;
};

/// What is done with a run. Enqueues its work; the run's memory is its own until it returns.
using MemberWork = std::function<void(const MemberRun&)>;

}  // namespace moesaic
