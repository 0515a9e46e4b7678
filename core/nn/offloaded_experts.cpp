// The store's part in offloaded experts: which storages they are, in which groups, and how they start.
#include <algorithm>

#include <fmt/format.h>

#include "core/nn/expert_tiers.h"
#include "core/nn/parameter_store.h"
#include "kernels/backend.h"

namespace moesaic {
namespace {

// "…experts.w13" is "gate_up", "…experts.{}.w2.weight" is "down"; others keep their own last word.
std::string group_name(std::string storage) {
  const std::string suffix = ".weight";
  if (storage.size() > suffix.size() && storage.ends_with(suffix))
    storage.resize(storage.size() - suffix.size());
  const std::string last = storage.substr(storage.rfind('.') + 1);
  return last == "w13" ? "gate_up" : last == "w2" ? "down" : last;
}

// Of the kinds that an optimizer keeps the one that frozen parameters have as well.
constexpr const char* kAverage = "average";

}  // namespace

void ParameterStore::offload_experts(ExpertTierOptions options) {
  MOESAIC_CHECK(!sealed_, "offloading comes before seal()");
  tier_options_ = std::make_shared<const ExpertTierOptions>(std::move(options));
}

void ParameterStore::mark_tiers() {
  if (tier_options_ == nullptr) return;
  for (Storage& s : storages_) {
    if (s.members == 0 || s.params.empty() || spec(s.params.front()).part != Part::routed_expert)
      continue;
    s.tiered_state = true;
    s.tiered_weights = tier_options_->weights;
    offloads_weights_ = offloads_weights_ || s.tiered_weights;
  }
}

void ParameterStore::make_tiers() {
  if (tier_options_ == nullptr) return;
  std::vector<TierGroup> groups = tier_groups(tier_options_->state_kinds);
  if (groups.empty()) return;
  tiers_ = std::make_shared<ExpertTiers>(
      std::move(groups), *tier_options_, precision_, device_, pretend_);
}

std::vector<TierGroup> ParameterStore::tier_groups(
    const std::vector<std::string>& state_kinds) const {
  MOESAIC_CHECK(sealed_, "groups of offloaded experts are known after seal()");
  MOESAIC_CHECK(tier_options_ != nullptr, "groups of a store without offload_experts()");
  std::vector<TierGroup> groups;
  for (std::size_t i = 0; i < storages_.size(); ++i) {
    const Storage& s = storages_[i];
    if (!s.tiered_state) continue;
    auto group = std::find_if(groups.begin(), groups.end(), [&](const TierGroup& g) {
      return g.members == s.members && g.rows == s.rows && g.cols == s.cols &&
             g.weight_dtype == s.dtype;
    });
    if (group == groups.end()) {
      group = groups.insert(group,
                            {.name = group_name(s.name),
                             .members = s.members,
                             .rows = s.rows,
                             .cols = s.cols,
                             .trained = false,
                             .weight_dtype = s.dtype});
      for (auto other = groups.begin(); other != group; ++other)
        if (other->name == group->name) group->name += fmt::format("_{}", groups.size());
    }
    const std::int64_t each = s.rows * s.cols;
    MOESAIC_CHECK(s.own.begin % each == 0 && s.own.end % each == 0,
                  "'" + s.name + "' is cut inside a member");
    group->storages.push_back({static_cast<std::int32_t>(i)});
    group->own.push_back({s.own.begin / each, s.own.end / each});
    group->owned += (s.own.end - s.own.begin) / each;
    group->trained = group->trained || (is_trained(s) && !weights_alone_);
  }
  for (TierGroup& g : groups) {
    const auto elements = static_cast<std::size_t>(g.rows * g.cols);
    g.weight_bytes = elements * byte_size(g.weight_dtype);
    if (weights_alone_) continue;
    if (g.trained) g.gradient_bytes = elements * byte_size(precision_.grad);
    if (g.weight_dtype != precision_.master && precision_.split_masters)
      g.state_sections.emplace_back("remainder", elements * byte_size(DType::u16));
    if (g.weight_dtype != precision_.master && !precision_.split_masters)
      g.state_sections.emplace_back("master", elements * byte_size(precision_.master));
    for (const std::string& kind : state_kinds)
      if (g.trained || kind == kAverage)
        g.state_sections.emplace_back(kind, elements * byte_size(precision_.master));
  }
  return groups;
}

const ParameterStore::Storage& ParameterStore::resident_weights(StorageId id) const {
  MOESAIC_CHECK(!has_tiered_weights(id),
                "'" + at(id).name +
                    "' is offloaded: its weights and gradients come in runs of members, or with "
                    "ExpertTiers::with_members()");
  return at(id);
}

const ParameterStore::Storage& ParameterStore::resident_master(StorageId id) const {
  const Storage& s = at(id);
  MOESAIC_CHECK(!s.tiered_state || (s.dtype == precision_.master && !s.tiered_weights),
                "'" + s.name +
                    "' is offloaded: its masters come with ExpertTiers::with_members() or "
                    "with_host()");
  return s;
}

TensorView ParameterStore::box_of_member(const TensorView& member, ParamId id) const {
  if (member.empty()) return {};
  const Storage& s = at(storage_of(id));
  check_shape(member, {s.rows, s.cols}, "a member");
  const Shape& shape = place(id).block.extent;
  const std::int64_t first = place(id).first_row, rows = shape.numel() / s.cols;
  return member.rows(first, first + rows).reshaped(shape);
}

void ParameterStore::initialize_member(StorageId id,
                                       std::int64_t member,
                                       std::uint64_t seed,
                                       Backend& backend) {
  const Storage& s = at(id);
  const std::int64_t begin = member * s.rows * s.cols;
  const bool is_own = s.own.begin <= begin && begin < s.own.end;
  const auto fill = [&](const MemberTensors& tensors) {
    for (const ParamId p : s.params) {
      InitialValues values = initial_values(p, member, seed);
      values.y = s.tiered_weights ? box_of_member(tensors.weight, p) : weight(p, member);
      values.copy = box_of_member(tensors.master, p);
      values.remainder = box_of_member(tensors.remainder, p);
      run(backend, values);
    }
    for (const TensorView& state : tensors.state)
      if (!state.empty()) zero_tensor(state, stream_of(backend));
  };
  if (!s.tiered_weights && !is_own) return fill({});
  ExpertTiers::Access access;
  access.weight = s.tiered_weights ? MemberAccess::replace : MemberAccess::none;
  access.state = is_own ? MemberAccess::replace : MemberAccess::none;
  tiers_->with_members(
      id, std::span(&member, 1), access, stream_of(backend), [&](const auto& members) {
        fill(members.front());
      });
}

}  // namespace moesaic
