// Experts whose state, or all of them, come to the device member by member (core/nn/expert_tiers.h): the same ops on the
// same values as for those that lie there, so that no bit depends on where an expert is.
#include <algorithm>

#include "core/nn/expert_tiers.h"
#include "core/train/offloaded_state.h"
#include "core/train/optimizer.h"
#include "core/train/store_ids.h"
#include "kernels/ops/clip.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/guard.h"
#include "kernels/ops/member_scalars.h"

namespace moesaic {
namespace {

// Members of which the ranks along Axis::etp have parts: as many as the fewest slots hold while another one is on its way.
constexpr std::size_t kSplitAtOnce = 2;

// Rows [i] of a tensor by members.
TensorView member_of(const TensorView& slots, std::int64_t i) {
  if (slots.empty()) return {};
  return slots.rows(i, i + 1).reshaped({slots.dim(1), slots.dim(2)});
}

bool is_dry(Backend& backend) {
  return stream_of(backend).mode() == Stream::Mode::dry;
}

TensorView shaped(const TensorView& view, const Shape& shape) {
  return view.empty() ? view : view.reshaped(shape);
}

}  // namespace

std::vector<std::string> expert_state_kinds(const OptimizerOptions& options) {
  std::vector<std::string> kinds{"m", "v"};
  if (options.muon) kinds = {"momentum"};
  if (options.ema_decay) kinds.emplace_back(kAverageKind);
  return kinds;
}

// Whoever speaks for a tensor, or owns its state, adds it up.
bool Optimizer::sums_squares(StorageId id) const {
  const auto ids = params_.params_of(id);
  if (ids.empty() || !entry(ids.front()).trained) return false;
  return !split_ || params_.is_sharded(ids.front()) || params_.speaks_for(ids.front());
}

void Optimizer::gradients_final(Backend& backend, StorageId first) {
  if (params_.tiers() == nullptr) return;
  for (std::size_t s = states_.size(); s-- > static_cast<std::size_t>(first.index);) {
    const StorageId id = storage_id(s);
    if (!params_.has_tiered_weights(id) || summed_[s] != 0 || !sums_squares(id)) continue;
    sum_squares_of_members(backend, id);
  }
}

void Optimizer::gradient_final(Backend& backend,
                               StorageId id,
                               std::int64_t member,
                               const TensorView& gradient) {
  if (!sums_squares(id)) return;
  sum_squares_of_member(backend, id, member, gradient);
  summed_[static_cast<std::size_t>(id.index)] = 1;
}

// The partials of what this rank owns of a storage.
void Optimizer::sum_squares_of_members(Backend& backend, StorageId id) {
  const auto ids = params_.params_of(id);
  const bool is_frozen =
      std::all_of(ids.begin(), ids.end(), [&](ParamId p) { return params_.frozen(p); });
  for (const std::int64_t m : own_members(params_, id)) {
    const bool is_zero = is_frozen || (!is_dry(backend) && !params_.tiers()->has_gradient(id, m));
    if (is_zero) {
      sum_squares_of_member(backend, id, m, {});
      continue;
    }
    params_.tiers()->with_members(id,
                                  {&m, 1},
                                  {.gradient = MemberAccess::read},
                                  stream_of(backend),
                                  [&](std::span<const MemberTensors> members) {
                                    sum_squares_of_member(backend, id, m, members[0].gradient);
                                  });
  }
  summed_[static_cast<std::size_t>(id.index)] = 1;
}

// An empty gradient is zero.
void Optimizer::sum_squares_of_member(Backend& backend,
                                      StorageId id,
                                      std::int64_t member,
                                      const TensorView& gradient) {
  const auto ids = params_.params_of(id);
  const auto each = static_cast<std::int64_t>(ids.size());
  for (std::int64_t i = 0; i < each; ++i) {
    const ParamId p = ids[static_cast<std::size_t>(i)];
    const TensorView partial = partials_of(id, member * each + i);
    if (gradient.empty() || params_.frozen(p)) {
      run(backend, Fill{.y = partial, .value = 0.0});
    } else {
      run(backend, SumOfSquares{.partials = partial, .x = params_.box_of_member(gradient, p)});
    }
  }
}

// The last layer first, so that the cache holds at the end what the next step needs first.
void Optimizer::update_experts(Backend& backend) {
  if (params_.tiers() == nullptr) return;
  expert_scalars_ = scalars_;
  expert_decay_ = options_.ema_decay ? average_decay() : 0;
  for (std::size_t s = states_.size(); s-- > 0;) {
    const StorageId id = storage_id(s);
    if (!params_.has_tiered_state(id)) continue;
    std::vector<LateUpdates> of_step;
    for (const std::int64_t m : own_members(params_, id))
      of_step.push_back({m, 0, 1});
    Backend* const backends[] = {&backend};
    update_members(backends, id, {.all = of_step, .end = of_step.size()}, {});
  }
}

TensorView Optimizer::late_scalars_of(std::int64_t step) const {
  const std::int64_t row = step % late_steps();
  return late_scalars_.rows(row, row + 1).reshaped(scalars_.shape());
}

// Until the phase ends the next steps form the same groups of parameters.
void Optimizer::put_off_experts(Backend& backend, std::int64_t step) {
  MOESAIC_CHECK(!options_.skip_untouched, "counts of tokens are those of the step in progress");
  put_off_ = guarded_ = late_scalars_of(step);
  copy_tensor(put_off_, scalars_, stream_of(backend));
  late_decays_[static_cast<std::size_t>(step % late_steps())] =
      options_.ema_decay ? average_decay() : 0;
}

void Optimizer::update_experts_of(std::span<Backend* const> backends,
                                  StorageId id,
                                  const LateMembers& members,
                                  bool with_gradients,
                                  bool outside) {
  update_members(backends,
                 id,
                 members,
                 {.with_gradients = with_gradients, .beside = true, .outside = outside});
}

void Optimizer::guard_experts(Backend& backend, StorageId id) {
  const TensorView next =
      guarded_scalars_.rows(num_guarded_, num_guarded_ + 1).reshaped(scalars_.shape());
  ++num_guarded_;
  copy_tensor(next, guarded_, stream_of(backend));
  guarded_ = next;
  if (!sums_squares(id)) return;
  run(backend,
      GuardFinite{.scalars = guarded_.rows(0, 1).reshaped({kNumStepScalars}),
                  .values = partials_of(id)});
  share_skip(backend, guarded_);
}

void Optimizer::update_guarded_experts_of(std::span<Backend* const> backends,
                                          StorageId id,
                                          std::span<const LateUpdates> members) {
  has_early_updates_ = has_early_updates_ || updates_experts_of(id);  // all ranks alike
  update_members(
      backends, id, {.all = members, .end = members.size()}, {.beside = true, .guarded = true});
}

bool Optimizer::splits_experts() const {
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const ParamId id = param_id(i);
    if (params_.has_tiered_state(params_.storage_of(id)) && entries_[i].trained &&
        updates_in_parts(id))
      return true;
  }
  return false;
}

bool Optimizer::trains_experts_of(StorageId id) const {
  const auto ids = params_.params_of(id);
  return entry(ids.front()).trained &&
         std::any_of(ids.begin(), ids.end(), [&](ParamId p) { return !params_.frozen(p); });
}

bool Optimizer::updates_experts_of(StorageId id) const {
  return options_.ema_decay.has_value() || trains_experts_of(id);
}

void Optimizer::update_members(std::span<Backend* const> backends,
                               StorageId id,
                               const LateMembers& updates,
                               const HowUpdated& how) {
  const ParamId first = params_.params_of(id).front();
  const bool moves = trains_experts_of(id),
             is_idle = updates.all.empty() || !updates_experts_of(id);
  ExpertTiers& tiers = *params_.tiers();
  std::vector<std::int64_t> members;
  for (const LateUpdates& u : updates.all)
    members.push_back(u.member);
  if (updates.is_first && !is_dry(*backends.front()))
    tiers.begin_update(
        id,
        is_idle ? std::span<const std::int64_t>() : std::span<const std::int64_t>(members),
        how.outside);
  if (is_idle) return;
  const bool has_gradients = moves && how.with_gradients,
             is_tiered = params_.has_tiered_weights(id);
  ExpertTiers::Access access{.state = MemberAccess::change, .beside = how.beside};
  if (is_tiered) {
    // A step that is skipped writes nothing, so that only what is written in any case may be brought without its values.
    const bool by_master = has_separate_master(first);
    const MemberAccess changed = by_master ? MemberAccess::replace : MemberAccess::change;
    access.weight = moves ? changed : by_master ? MemberAccess::none : MemberAccess::read;
    access.gradient = has_gradients ? MemberAccess::read : MemberAccess::none;
    access.last_use_of_gradient = has_gradients;
  }
  const bool in_parts = moves && updates_in_parts(first);
  const std::size_t at_once = in_parts ? kSplitAtOnce : 1;
  for (std::size_t i = updates.begin; i < updates.end; i += at_once) {
    Backend& backend = *backends[i / at_once % backends.size()];
    const auto turn = std::span(members).subspan(i, std::min(at_once, updates.end - i));
    tiers.with_members(
        id, turn, access, stream_of(backend), [&](std::span<const MemberTensors> tensors) {
          std::vector<MemberState> states;
          for (std::size_t k = 0; k < turn.size(); ++k)
            states.push_back(member_state(id, turn[k], tensors[k]));
          if (!in_parts) return make_late_updates(backend, id, updates.all[i], states.front(), how);
          MOESAIC_CHECK(!how.beside, "matrices that ranks put together in the middle of a step");
          update_split_members(backend, id, turn, states);
          for (const MemberState& state : states)
            average_member(backend, state);
        });
  }
}

// One update after the other, all but the last without a gradient.
void Optimizer::make_late_updates(Backend& backend,
                                  StorageId id,
                                  const LateUpdates& updates,
                                  const MemberState& state,
                                  const HowUpdated& how) {
  const bool moves = trains_experts_of(id);
  for (std::int64_t step = updates.first; step < updates.end; ++step) {
    MemberState now = state;
    const bool has_gradient = how.with_gradients && step + 1 == updates.end;
    if (moves && !has_gradient) now.tensors.gradient = params_.tiers()->zero_gradient(id);
    if (how.beside) {
      expert_scalars_ = late_scalars_of(step);
      expert_decay_ = late_decays_[static_cast<std::size_t>(step % late_steps())];
    }
    if (how.guarded && step + 1 == updates.end) expert_scalars_ = guarded_;
    if (moves) update_member(backend, id, updates.member, now);
    average_member(backend, now);
  }
  if (moves) round_member(backend, id, state);
}

// The ranks that split these members bring the same ones at the same time.
void Optimizer::update_split_members(Backend& backend,
                                     StorageId id,
                                     std::span<const std::int64_t> members,
                                     std::span<const MemberState> states) {
  const auto ids = params_.params_of(id);
  const bool by_use = !member_scalars_.empty() && params_.spec(ids.front()).use_counts.valid();
  for (const ParamId p : ids) {
    if (params_.frozen(p)) continue;
    for (std::size_t k = 0; k < members.size(); ++k) {
      const Tensors& t = states[k].tensors;
      const auto box = [&](const TensorView& v) { return params_.box_of_member(v, p); };
      put_off(backend,
              {p,
               {.master = box(t.master),
                .compute = is_rounded_last(id) ? TensorView() : box(t.compute),
                .remainder = box(t.remainder),
                .gradient = box(t.gradient),
                .m = {},
                .v = {},
                .momentum = box(t.momentum)},
               by_use ? scalars_by_use(backend, p, members[k]) : expert_scalars_of(entry(p))});
    }
    if (by_use) update_split_matrices(backend);  // the next parameter has other scalars there
  }
  update_split_matrices(backend);
  for (const MemberState& state : states)
    round_member(backend, id, state);
}

bool Optimizer::has_separate_master(ParamId id) const {
  return !params_.masters_are_weights(id) && !params_.precision().split_masters;
}

Optimizer::MemberState Optimizer::member_state(StorageId id,
                                               std::int64_t member,
                                               const MemberTensors& t) const {
  const ParamId first = params_.params_of(id).front();
  const bool is_here = !params_.has_tiered_weights(id);
  const TensorView weight = is_here ? member_of(params_.storage_weight(id), member) : t.weight;
  MemberState state;
  Tensors& own = state.tensors;
  own.gradient = is_here ? member_of(params_.grad(id), member) : t.gradient;
  if (params_.masters_are_weights(first)) {
    own.master = weight;
  } else {
    own.master = t.master;
    own.remainder = t.remainder;
    own.compute = weight;
  }
  const std::vector<std::string> kinds = expert_state_kinds(options_);
  for (std::size_t k = 0; k < std::min(kinds.size(), t.state.size()); ++k) {
    TensorView& of_kind = kinds[k] == "m"          ? own.m
                          : kinds[k] == "v"        ? own.v
                          : kinds[k] == "momentum" ? own.momentum
                                                   : state.average;
    of_kind = t.state[k];
  }
  return state;
}

void Optimizer::update_member(Backend& backend,
                              StorageId id,
                              std::int64_t member,
                              const MemberState& state) {
  const auto ids = params_.params_of(id);
  const ParamId first = ids.front();
  Tensors whole = state.tensors;
  if (is_rounded_last(id)) whole.compute = {};
  const bool by_use = !member_scalars_.empty() && params_.spec(first).use_counts.valid();
  const auto in_shape = [&](const Tensors& t, const auto& view_of) {
    return Tensors{.master = view_of(t.master),
                   .compute = view_of(t.compute),
                   .remainder = view_of(t.remainder),
                   .gradient = view_of(t.gradient),
                   .m = view_of(t.m),
                   .v = view_of(t.v),
                   .momentum = view_of(t.momentum)};
  };
  if (!by_use && is_uniform(id) && blocks_here(first).empty()) {
    const Entry& e = entry(first);
    const Shape& block = params_.block_of_member(first).extent;
    const Shape shape = e.muon ? Shape{static_cast<std::int64_t>(ids.size()), block[0], block[1]}
                               : Shape{block.numel() * static_cast<std::int64_t>(ids.size())};
    update_tensors(backend,
                   e,
                   in_shape(whole, [&](const TensorView& v) { return shaped(v, shape); }),
                   params_.spec(first),
                   {},
                   expert_scalars_of(e));
  } else {
    for (const ParamId p : ids) {
      if (params_.frozen(p)) continue;
      update_tensors(
          backend,
          entry(p),
          in_shape(whole, [&](const TensorView& v) { return params_.box_of_member(v, p); }),
          params_.spec(p),
          blocks_here(p),
          by_use ? scalars_by_use(backend, p, member) : expert_scalars_of(entry(p)));
    }
  }
}

// Their weights are brought without values, and a step that is skipped writes none.
bool Optimizer::is_rounded_last(StorageId id) const {
  return has_separate_master(params_.params_of(id).front()) && params_.has_tiered_weights(id);
}

void Optimizer::round_member(Backend& backend, StorageId id, const MemberState& state) {
  if (is_rounded_last(id))
    run(backend, Cast{.y = state.tensors.compute, .x = state.tensors.master});
}

// In row `member` of the members' scalars.
ConstTensorView Optimizer::scalars_by_use(Backend& backend, ParamId id, std::int64_t member) {
  const TensorView row = member_scalars_.rows(member, member + 1);
  const std::int64_t number = params_.number_of(id, member);
  run(backend,
      MemberScalars{
          .rows = row,
          .scalars = expert_scalars_of(entry(id)),
          .counts = params_.buffer(params_.spec(id).use_counts).rows(number, number + 1)});
  return row.reshaped({kNumStepScalars});
}

void Optimizer::average_member(Backend& backend, const MemberState& state) {
  if (state.average.empty()) return;
  const Tensors& t = state.tensors;
  run(backend,
      MovingAverage{.average = state.average,
                    .w = t.remainder.empty() ? t.master : t.compute,
                    .remainder = t.remainder,
                    .scalars = expert_scalars_.rows(0, 1).reshaped({kNumStepScalars}),
                    .decay = expert_decay_});
}

}  // namespace moesaic
