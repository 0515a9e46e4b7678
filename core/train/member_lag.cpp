#include "core/train/member_lag.h"

#include <utility>

#include "core/nn/expert_tiers.h"
#include "core/train/offloaded_state.h"

namespace moesaic {

MemberLag::MemberLag(const ParameterStore& params, std::int64_t most)
    : params_(params), most_(most) {}

std::vector<std::int64_t>& MemberLag::next_of(StorageId id) {
  std::vector<std::int64_t>& next = next_[id.index];
  if (next.empty())
    next.assign(static_cast<std::size_t>(params_.members_here(params_.params_of(id).front())), 0);
  return next;
}

LateUpdates MemberLag::give(std::int64_t member, std::int64_t& next) const {
  return {member, std::exchange(next, step_ + 1), step_ + 1};
}

std::vector<LateUpdates> MemberLag::of_step(StorageId id) {
  std::vector<LateUpdates> updates;
  std::vector<std::int64_t>& next = next_of(id);
  for (const std::int64_t m : own_members(params_, id)) {
    std::int64_t& first = next[static_cast<std::size_t>(m)];
    const bool is_due = step_ - first >= most_;
    if (first <= step_ && (is_due || params_.tiers()->has_gradient(id, m)))
      updates.push_back(give(m, first));
  }
  return updates;
}

std::vector<LateUpdates> MemberLag::behind(StorageId id, std::span<const std::int64_t> rows) {
  std::vector<LateUpdates> updates;
  std::vector<std::int64_t>& next = next_of(id);
  for (const std::int64_t m : own_members(params_, id)) {
    const auto at = static_cast<std::size_t>(m);
    if (next[at] <= step_ && (rows.empty() || rows[at] > 0)) updates.push_back(give(m, next[at]));
  }
  return updates;
}

}  // namespace moesaic
