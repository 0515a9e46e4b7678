#include "core/train/touch_recorder.h"

#include <algorithm>

#include "core/base/error.h"
#include "core/train/tier_schedule.h"

namespace moesaic {

using tiers::VisitKind;

TouchRecorder::TouchRecorder(ExpertTiers& tiers,
                             const std::filesystem::path& path,
                             tiers::Updates updates,
                             bool updates_beside)
    : tiers_(tiers),
      group_(tiers.groups().front()),
      updates_(updates),
      updates_beside_(updates_beside) {
  tiers::TouchLog head{.layers = static_cast<std::int32_t>(group_.storages.size()),
                       .experts = static_cast<std::int32_t>(group_.members),
                       .updates = updates};
  // An expert of a layer is a member of a storage of each group.
  for (const TierGroup& g : tiers.groups()) {
    const auto per_layer =
        static_cast<double>(g.storages.size()) / static_cast<double>(group_.storages.size());
    head.expert_bytes +=
        static_cast<std::uint64_t>(per_layer * static_cast<double>(g.weight_bytes));
    head.state_bytes +=
        static_cast<std::uint64_t>(per_layer * static_cast<double>(g.state_bytes()));
  }
  writer_.emplace(path, head);
  tiers_.observe([this](StorageId id, const MemberVisit& visit) { note(id, visit); });
}

TouchRecorder::~TouchRecorder() {
  tiers_.observe({});
}

void TouchRecorder::note(StorageId id, const MemberVisit& visit) {
  if (visit.outside) return;
  const auto at = std::find_if(group_.storages.begin(), group_.storages.end(), [&](StorageId s) {
    return s.index == id.index;
  });
  if (at == group_.storages.end()) return;
  const tiers::Visit here{
      static_cast<std::int32_t>(at - group_.storages.begin()), visit.kind, visit.micro_batch};
  auto seen =
      std::find_if(visits_.begin(), visits_.end(), [&](const Seen& s) { return s.visit == here; });
  if (seen == visits_.end())
    seen = visits_.insert(
        seen, {here, std::vector<std::int64_t>(static_cast<std::size_t>(group_.members), 0)});
  for (std::size_t m = 0; m < seen->rows.size(); ++m)
    seen->rows[m] += visit.rows.empty() ? 1 : visit.rows[m];
}

std::vector<tiers::Visit> TouchRecorder::with_updates() const {
  std::vector<tiers::Visit> all;
  for (const Seen& s : visits_)
    all.push_back(s.visit);
  if (updates_ == tiers::Updates::none) return all;
  if (updates_beside_) return with_updates_beside(all);
  for (auto layer = static_cast<std::int32_t>(group_.storages.size()); layer-- > 0;)
    all.push_back({layer, VisitKind::update, 0});
  return all;
}

void TouchRecorder::end_step(std::int64_t step) {
  auto seen = visits_.begin();
  for (const tiers::Visit& visit : with_updates()) {
    if (visit.kind == VisitKind::forward) {
      writer_->forward(step, visit, seen->rows);
    } else {
      writer_->other(step, visit);
    }
    if (visit.kind != VisitKind::update) ++seen;
  }
  visits_.clear();
}

}  // namespace moesaic
