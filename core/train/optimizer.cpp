// What an optimizer is made of, and a step from its begin to its outcome. Beside this file: optimizer_norm.cpp,
// optimizer_update.cpp, optimizer_state.cpp.
#include "core/train/optimizer.h"

#include <algorithm>

#include "core/nn/expert_tiers.h"
#include "core/train/host_value.h"
#include "core/train/store_ids.h"

namespace moesaic {
namespace {
// How far an expert may fall behind; their scalars are kept.
constexpr std::int64_t kLateSteps = 64;
}  // namespace

Optimizer::Optimizer(ParameterStore& params,
                     const OptimizerOptions& options,
                     const ParameterStore* whole)
    : params_(params), options_(options), split_(whole != nullptr) {
  const DType master = params.precision().master;
  entries_.resize(params.params().size());
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const ParameterSpec& spec = params.params()[i];
    entries_[i].trained = params.ever_trained(param_id(i));
    entries_[i].muon = options.muon && spec.matrix;
    for (const auto& [axis, dim] : spec.placement.splits)
      split_ = split_ || params.position().extent(axis) > 1;
    split_ = split_ || params.is_sharded(param_id(i));
  }
  whole_.emplace(params, [&](ParamId id) {
    return entry(id).trained && entry(id).muon && blocks_here(id).empty();
  });
  const std::int64_t num_partials = place_partials(whole != nullptr ? *whole : params);
  allocate_state(master);
  // Phases may freeze any sets of parameters: no two need have been updated equally often.
  const auto max_groups = std::max<std::int64_t>(1, static_cast<std::int64_t>(entries_.size()));
  const std::size_t scalar_bytes =
      static_cast<std::size_t>(max_groups * kNumStepScalars) * byte_size(master);
  small_ = params.allocate(
      (scalar_bytes + 63) / 64 * 64 + static_cast<std::size_t>(num_partials + 1) * 8,
      "step scalars");
  scalars_ = small_.view({max_groups, kNumStepScalars}, master);
  expert_scalars_ = scalars_;
  if (params.tiers() != nullptr) {
    const std::int64_t steps =
        options.lazy_untouched && params.tiers()->holds_weights() ? kLateSteps : 1;
    late_decays_.assign(static_cast<std::size_t>(steps), 0);
    late_memory_ = params.allocate(static_cast<std::size_t>(steps) * scalar_bytes, "step scalars");
    late_scalars_ = late_memory_.view({steps, max_groups, kNumStepScalars}, master);
  }
  if (params.tiers() != nullptr && params.tiers()->gradients_in_ring()) {
    std::int64_t storages = 0;
    for (const TierGroup& group : params.tiers()->groups())
      storages += static_cast<std::int64_t>(group.storages.size());
    guarded_memory_ =
        params.allocate(static_cast<std::size_t>(storages) * scalar_bytes, "step scalars");
    guarded_scalars_ = guarded_memory_.view({storages, max_groups, kNumStepScalars}, master);
  }
  partials_ = small_.view({num_partials}, DType::f64, (scalar_bytes + 63) / 64 * 64 + 8);
  norm_ = small_.view({1}, DType::f64, (scalar_bytes + 63) / 64 * 64);
  host_ = params.is_pretend()
              ? Buffer(scalar_bytes + 64, kCpu, "step scalars, host")
              : make_host_buffer(scalar_bytes + 64, params.device(), "step scalars, host");
  host_scalars_ = host_.view({max_groups, kNumStepScalars}, master);
  host_norm_ = host_.view({1}, DType::f64, scalar_bytes / 8 * 8);
  host_early_skip_ = host_.view({1}, master, scalar_bytes / 8 * 8 + 8);
  group_updates_ = {0};
  summed_.assign(states_.size(), 0);
  clear_state();
  if (!options.skip_untouched) return;
  std::int64_t most = 0;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (params.params()[i].use_counts.valid())
      most = std::max(most, params.members_here(param_id(i)));
  }
  if (most == 0) return;
  member_memory_ = params.allocate(
      static_cast<std::size_t>(most * kNumStepScalars) * byte_size(master), "step scalars");
  member_scalars_ = member_memory_.view({most, kNumStepScalars}, master);
}

std::vector<MemoryUse> Optimizer::memory_use() const {
  return {
      {"optimizer state", memory_.bytes()},
      {"whole matrices", whole_->bytes()},
      {"step scalars",
       small_.bytes() + member_memory_.bytes() + late_memory_.bytes() + guarded_memory_.bytes()}};
}

// Whether one op may do for all parameters of a storage what each of them needs.
bool Optimizer::is_uniform(StorageId id) const {
  const auto ids = params_.params_of(id);
  const ParameterSpec& first = params_.params()[static_cast<std::size_t>(ids.front().index)];
  for (const ParamId p : ids) {
    const ParameterSpec& spec = params_.params()[static_cast<std::size_t>(p.index)];
    if (!(spec.shape == first.shape) || spec.decay != first.decay ||
        params_.frozen(p) != params_.frozen(ids.front()) ||
        entry(p).lr_scale != entry(ids.front()).lr_scale ||
        entry(p).group != entry(ids.front()).group)
      return false;
  }
  return true;
}

// Parameters that were updated as often share their bias corrections.
void Optimizer::assign_groups() {
  group_updates_.clear();
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    Entry& e = entries_[i];
    if (!e.trained || params_.frozen(param_id(i))) continue;
    auto it = std::find(group_updates_.begin(), group_updates_.end(), e.updates);
    if (it == group_updates_.end()) {
      it = group_updates_.insert(group_updates_.end(), e.updates);
    }
    e.group = static_cast<int>(it - group_updates_.begin());
  }
  if (group_updates_.empty()) group_updates_ = {0};
}

void Optimizer::begin_step(StepScalars values, Stream& stream) {
  assign_groups();
  for (std::size_t g = 0; g < group_updates_.size(); ++g) {
    const auto t = static_cast<double>(group_updates_[g] + 1);
    values.bias_correction1 = bias_correction(options_.beta1, t);
    values.bias_correction2 = bias_correction(options_.beta2, t);
    const auto row = static_cast<std::int64_t>(g);
    values.write(host_scalars_.rows(row, row + 1).reshaped({kNumStepScalars}));
  }
  const auto rows = static_cast<std::int64_t>(group_updates_.size());
  copy_tensor(scalars_.rows(0, rows), host_scalars_.rows(0, rows), stream);
  if (split_) zero_tensor(partials_, stream);  // others fill in theirs
  summed_.assign(states_.size(), 0);
  num_guarded_ = 0;
  has_early_updates_ = false;
}

void Optimizer::download_outcome(Stream& stream) {
  // Groups differ in their counts of updates only, and rows of groups that do not exist were never written.
  copy_tensor(host_scalars_.rows(0, 1), scalars_.rows(0, 1), stream);
  copy_tensor(host_norm_, norm_, stream);
  if (has_early_updates_) {
    const int skip = index_of(StepScalar::skip);
    copy_tensor(host_early_skip_,
                put_off_.rows(0, 1).reshaped({kNumStepScalars}).rows(skip, skip + 1),
                stream);
  }
}

Optimizer::Outcome Optimizer::outcome() const {
  const bool skipped = host_value(host_scalars_, index_of(StepScalar::skip)) != 0;
  // What was skipped as a whole was so from the first update on.
  const bool half_made = skipped && has_early_updates_ && host_value(host_early_skip_, 0) == 0;
  return {host_norm_.as<double>()[0], skipped, half_made};
}

Optimizer::Outcome Optimizer::read_outcome(Stream& stream) {
  download_outcome(stream);
  stream.synchronize();
  return outcome();
}

void Optimizer::end_step(const Outcome& outcome) {
  if (outcome.skipped) return;
  ++updates_;
  for (std::size_t i = 0; i < entries_.size(); ++i)
    entries_[i].updates += entries_[i].trained && !params_.frozen(param_id(i)) ? 1 : 0;
}

}  // namespace moesaic
