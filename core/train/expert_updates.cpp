#include "core/train/expert_updates.h"

#include <algorithm>
#include <exception>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/train/member_reduction.h"
#include "core/train/phases.h"

namespace moesaic {
namespace {

class Flag {
 public:
  explicit Flag(bool& is) : is_(is) { is_ = true; }
  ~Flag() { is_ = false; }
  Flag(const Flag&) = delete;
  Flag& operator=(const Flag&) = delete;

 private:
  bool& is_;
};

}  // namespace

bool ExpertUpdates::can_run_beside(const ParameterStore& params, const Optimizer& optimizer) {
  if (params.tiers() != nullptr && params.tiers()->gradients_in_ring()) return true;
  return params.tiers() != nullptr && params.tiers()->holds_weights() &&
         !optimizer.options().skip_untouched && !MemberReduction(params, nullptr).is_needed() &&
         (!optimizer.options().muon ||
          (optimizer.options().lazy_untouched && !optimizer.splits_experts()));
}

void ExpertUpdates::check_in_backward(const config::Config& config,
                                      const ParameterStore& params,
                                      const Optimizer& optimizer) {
  if (config.experts.update != config::ExpertUpdateTime::in_backward) return;
  const auto refuse = [](const std::string& why, const char* otherwise) {
    throw UsageError("experts.update: in_backward " + why +
                     "; allowed: experts.update=after_step, or " + otherwise);
  };
  if (MemberReduction(params, nullptr).is_needed())
    refuse(
        "needs every expert's gradient on one rank, and here several ranks have the same experts",
        "a parallel.ep that deals all ranks other experts (dp x cp x tp / etp)");
  if (optimizer.options().muon && optimizer.splits_experts())
    refuse("updates experts one by one, and Muon puts slices of them together (parallel.etp)",
           "parallel.etp=1, or optimizer.name=adamw");
  if (config.parallel.order == config::LayerOrder::vertical) return;
  for (const Phase& phase : make_phases(config)) {
    const std::int64_t micro_batches = phase.micro_batches(params.position().extent(Axis::dp));
    if (micro_batches > 1)
      refuse(fmt::format("needs the losses of all micro-batches before the first gradient is "
                         "final, and parallel.order is horizontal with {} micro-batches a step",
                         micro_batches),
             "parallel.order=vertical");
  }
}

ExpertUpdates::ExpertUpdates(ParameterStore& params,
                             Optimizer& optimizer,
                             const BackendOwner::Options& options)
    : params_(params),
      optimizer_(optimizer),
      lag_(params, optimizer.late_steps() - 1),
      in_backward_(params.tiers()->gradients_in_ring()) {
  for (int i = 0; i < streams_on(options.device); ++i) {
    owners_.push_back(std::make_unique<BackendOwner>(options));
    beside_.push_back(&owners_.back()->backend());
  }
  for (const TierGroup& group : params.tiers()->groups()) {
    Group& own = groups_.emplace_back(Group{.storages = group.storages});
    own.done = own.layers() * parts_;
  }
  params.tiers()->set_put_off(this);
}

namespace {

// In the place of updates that are lost: nobody may take the values of before for those of the last step.
class Lost final : public ExpertTiers::PutOff {
 public:
  void before(StorageId, const MemberVisit&) override { refuse(); }
  void after(StorageId, const MemberVisit&) override { refuse(); }
  void before_gradients() override { refuse(); }
  void finish() override { refuse(); }
  bool awaits(StorageId) const override { return false; }

 private:
  [[noreturn]] static void refuse() {
    throw InternalError("offloaded experts are behind: their updates ended with their trainer");
  }
};

}  // namespace

ExpertUpdates::~ExpertUpdates() {
  static Lost lost;
  try {
    const bool is_behind = std::any_of(groups_.begin(), groups_.end(), [&](const Group& group) {
      return group.done < group.layers() * parts_ ||
             std::any_of(group.storages.begin(), group.storages.end(), [&](StorageId id) {
               return !lag_.behind(id, {}).empty();
             });
    });
    params_.tiers()->set_put_off(is_behind ? &lost : nullptr);
    for (const auto& owner : owners_)
      owner->stream().synchronize();
  } catch (const std::exception&) {  // was thrown before, or is lost with what it was about
  }
}

void ExpertUpdates::set_parts(std::int32_t parts) {
  MOESAIC_CHECK(parts > 0, "parts of a layer's updates");
  for (Group& group : groups_) {
    MOESAIC_CHECK(group.done == group.layers() * parts_, "updates that are left");
    group.done = group.layers() * parts;
  }
  parts_ = parts;
}

// Those of the step before are long over: a backward, or most of a forward, came after them. An error in one of them shows here.
void ExpertUpdates::finish_step_before() {
  for (const auto& owner : owners_)
    owner->stream().synchronize();
}

void ExpertUpdates::let_wait_for(Backend& main) {
  Event ready(stream_of(main).device());
  stream_of(main).record(ready);
  for (const auto& owner : owners_)
    owner->stream().wait(ready);
}

void ExpertUpdates::begin_backward(Backend& main) {
  MOESAIC_CHECK(in_backward_ && !left_, "updates in a backward begin once a step");
  finish_step_before();
  optimizer_.put_off_experts(main, lag_.end_step());
  left_.emplace();
  for (const Group& group : groups_)
    left_->insert(left_->end(), group.storages.begin(), group.storages.end());
  std::sort(
      left_->begin(), left_->end(), [](StorageId a, StorageId b) { return a.index < b.index; });
}

void ExpertUpdates::gradients_final(Backend& main, StorageId first) {
  MOESAIC_CHECK(left_.has_value(), "gradients are final before all forwards are enqueued");
  std::vector<StorageId> due;
  for (; !left_->empty() && left_->back().index >= first.index; left_->pop_back())
    due.push_back(left_->back());
  if (due.empty()) return;
  for (const StorageId id : due)
    optimizer_.guard_experts(main, id);
  let_wait_for(main);
  const Flag updating(is_updating_);
  for (const StorageId id : due) {
    const std::vector<LateUpdates> updates = lag_.of_step(id);
    optimizer_.update_guarded_experts_of(beside_, id, updates);
    count(id, updates, 1);
  }
}

void ExpertUpdates::begin(Backend& main) {
  if (in_backward_) {
    MOESAIC_CHECK(left_ && left_->empty(), "experts whose gradients were never final");
    return left_.reset();
  }
  update_all(true);
  finish_step_before();
  optimizer_.put_off_experts(main, lag_.end_step());
  let_wait_for(main);
  for (Group& group : groups_)
    group.done = 0;
  for (Group& group : groups_)
    update(group, updates_due::at_once(pace(group)), false);
}

void ExpertUpdates::update(Group& group, std::int32_t until, bool outside) {
  if (is_updating_ || group.done >= until) return;
  const Flag updating(is_updating_);
  for (; group.done < until; ++group.done)
    update_part(group, outside);
}

// The next one. What is to be done for a storage is decided with its first.
void ExpertUpdates::update_part(Group& group, bool outside) {
  const StorageId id = group.storages[static_cast<std::size_t>(group.done / parts_)];
  const auto part = static_cast<std::size_t>(group.done % parts_),
             parts = static_cast<std::size_t>(parts_);
  if (part == 0) group.updates = lag_.of_step(id);
  const std::size_t all = group.updates.size();
  optimizer_.update_experts_of(beside_,
                               id,
                               {.all = group.updates,
                                .begin = all * part / parts,
                                .end = all * (part + 1) / parts,
                                .is_first = part == 0},
                               true,
                               outside);
  if (part + 1 < parts) return;
  params_.tiers()->end_update(id);
  count(id, group.updates, 1);
}

// The schedule knows of no such use.
void ExpertUpdates::replay(StorageId id, std::span<const std::int64_t> rows) {
  if (is_updating_) return;
  const std::vector<LateUpdates> updates = lag_.behind(id, rows);
  if (updates.empty()) return;
  const Flag updating(is_updating_);
  optimizer_.update_experts_of(beside_, id, {.all = updates, .end = updates.size()}, false, true);
  count(id, updates, 0);
}

// `in_time`: of each member's updates those that are the last step's, with the others of that step.
void ExpertUpdates::count(StorageId id,
                          std::span<const LateUpdates> updates,
                          std::int64_t in_time) {
  if (!optimizer_.updates_experts_of(id)) return;
  for (const LateUpdates& u : updates) {
    const std::int64_t late = u.end - u.first - in_time;
    replays_.members += late > 0 ? 1 : 0;
    replays_.steps += late;
  }
}

std::optional<ExpertReplays> ExpertUpdates::replays() const {
  if (optimizer_.late_steps() == 1) return std::nullopt;
  return replays_;
}

void ExpertUpdates::update_all(bool outside) {
  for (Group& group : groups_)
    update(group, group.layers() * parts_, outside);
}

void ExpertUpdates::before_gradients() {
  update_all(true);
}

void ExpertUpdates::finish() {
  MOESAIC_CHECK(!left_ || is_updating_, "experts are looked at in the middle of their updates");
  update_all(true);
  for (const Group& group : groups_) {
    for (const StorageId id : group.storages)
      replay(id, {});
  }
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
  if (left_) return;  // every member in use has had its forward, and before it what it missed
  if (visit.outside || visit.kind != tiers::VisitKind::forward) {
    update_all(visit.outside);
  } else {
    const Place place = place_of(id);
    Group& group = groups_[place.group];
    update(group,
           updates_due::before({place.layer, visit.kind, visit.micro_batch}, pace(group)),
           false);
  }
  replay(id, visit.rows);
}

void ExpertUpdates::after(StorageId id, const MemberVisit& visit) {
  const Place place = place_of(id);
  Group& group = groups_[place.group];
  update(
      group, updates_due::after({place.layer, visit.kind, visit.micro_batch}, pace(group)), false);
}

bool ExpertUpdates::awaits(StorageId id) const {
  const Place place = place_of(id);
  return (place.layer + 1) * parts_ > groups_[place.group].done;
}

}  // namespace moesaic
