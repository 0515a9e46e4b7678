#include "core/train/expert_updates.h"

#include <algorithm>
#include <exception>

#include "core/base/error.h"
#include "core/train/member_reduction.h"
#include "core/train/tier_schedule.h"

namespace moesaic {

bool ExpertUpdates::can_run_beside(const ParameterStore& params, const Optimizer& optimizer) {
  return params.tiers() != nullptr && params.tiers()->holds_weights() &&
         !optimizer.options().skip_untouched && !optimizer.updates_experts_together() &&
         !MemberReduction(params, nullptr).is_needed();
}

ExpertUpdates::ExpertUpdates(ParameterStore& params,
                             Optimizer& optimizer,
                             const BackendOwner::Options& options)
    : params_(params), optimizer_(optimizer), beside_(options) {
  for (const TierGroup& group : params.tiers()->groups()) {
    Group& own = groups_.emplace_back(Group{.storages = group.storages});
    own.done = own.layers();
  }
  params.tiers()->set_put_off(this);
}

ExpertUpdates::~ExpertUpdates() {
  params_.tiers()->set_put_off(nullptr);
  try {
    beside_.stream().synchronize();
  } catch (const std::exception&) {  // was thrown before, or is lost with what it was about
  }
}

void ExpertUpdates::begin(Backend& main) {
  finish();
  // Those of the step before are long over: the last backward came after them. An error in one of them shows here.
  beside_.stream().synchronize();
  optimizer_.put_off_experts(main);
  Event ready(stream_of(main).device());
  stream_of(main).record(ready);
  beside_.stream().wait(ready);
  for (Group& group : groups_)
    group.done = 0;
  for (Group& group : groups_)
    update(group, updates_due::at_once(group.layers()), false);
}

void ExpertUpdates::update(Group& group, std::int32_t until, bool outside) {
  if (is_updating_ || group.done >= until) return;
  struct Updating {
    bool& is;
    explicit Updating(bool& flag) : is(flag) { is = true; }
    ~Updating() { is = false; }
  } updating(is_updating_);
  for (; group.done < until; ++group.done) {
    const StorageId id = group.storages[static_cast<std::size_t>(group.done)];
    optimizer_.update_experts_of(beside_.backend(), id, outside);
    params_.tiers()->end_update(id);
  }
}

void ExpertUpdates::update_all(bool outside) {
  for (Group& group : groups_)
    update(group, group.layers(), outside);
}

void ExpertUpdates::finish() {
  update_all(true);
}

ExpertUpdates::Place ExpertUpdates::place_of(StorageId id) const {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const auto& storages = groups_[g].storages;
    const auto found = std::find_if(
        storages.begin(), storages.end(), [&](StorageId s) { return s.index == id.index; });
    if (found != storages.end()) return {g, static_cast<std::int32_t>(found - storages.begin())};
  }
  throw InternalError("a storage that is not offloaded");
}

void ExpertUpdates::before(StorageId id, const MemberVisit& visit) {
  if (visit.outside || visit.kind != tiers::VisitKind::forward) return update_all(visit.outside);
  const Place place = place_of(id);
  Group& group = groups_[place.group];
  update(group,
         updates_due::before({place.layer, visit.kind, visit.micro_batch}, group.layers()),
         false);
}

void ExpertUpdates::after(StorageId id, const MemberVisit& visit) {
  const Place place = place_of(id);
  Group& group = groups_[place.group];
  update(group,
         updates_due::after({place.layer, visit.kind, visit.micro_batch}, group.layers()),
         false);
}

bool ExpertUpdates::awaits(StorageId id) const {
  const Place place = place_of(id);
  return place.layer >= groups_[place.group].done;
}

}  // namespace moesaic
