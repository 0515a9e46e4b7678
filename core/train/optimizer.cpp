#include "core/train/optimizer.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include <fmt/format.h>

#include "kernels/ops/adamw.h"
#include "kernels/ops/clip.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/guard.h"
#include "kernels/ops/member_scalars.h"
#include "kernels/ops/muon.h"
#include "kernels/ops/qk_clip.h"

namespace moesaic {
namespace {
constexpr std::int64_t kAlignElements = 64;
std::int64_t aligned(std::int64_t n) {
  return (n + kAlignElements - 1) / kAlignElements * kAlignElements;
}
ParamId id_of(std::size_t i) {
  return {static_cast<std::int32_t>(i)};
}
StorageId storage_id(std::size_t i) {
  return {static_cast<std::int32_t>(i)};
}
TensorView reshaped(const TensorView& view, const Shape& shape) {
  return view.empty() ? view : view.reshaped(shape);
}
std::int64_t all_members(const ParameterSpec& spec) {
  return std::max<std::int64_t>(1, spec.members);
}
}  // namespace

Optimizer::Optimizer(ParameterStore& params,
                     const OptimizerOptions& options,
                     const ParameterStore* whole)
    : params_(params), options_(options), split_(whole != nullptr) {
  const DType master = params.precision().master;
  entries_.resize(params.params().size());
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const ParameterSpec& spec = params.params()[i];
    entries_[i].trained = params.ever_trained(id_of(i));
    entries_[i].muon = options.muon && spec.matrix;
    for (const auto& [axis, dim] : spec.placement.splits)
      split_ = split_ || params.position().extent(axis) > 1;
    split_ = split_ || params.is_sharded(id_of(i));
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
  partials_ = small_.view({num_partials}, DType::f64, (scalar_bytes + 63) / 64 * 64 + 8);
  norm_ = small_.view({1}, DType::f64, (scalar_bytes + 63) / 64 * 64);
  host_ = params.is_pretend()
              ? Buffer(scalar_bytes + 64, kCpu, "step scalars, host")
              : make_host_buffer(scalar_bytes + 64, params.device(), "step scalars, host");
  host_scalars_ = host_.view({max_groups, kNumStepScalars}, master);
  host_norm_ = host_.view({1}, DType::f64, scalar_bytes / 8 * 8);
  group_updates_ = {0};
  clear_state();
  if (!options.skip_untouched) return;
  std::int64_t most = 0;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (params.params()[i].use_counts.valid()) most = std::max(most, params.members_here(id_of(i)));
  }
  if (most == 0) return;
  member_memory_ = params.allocate(
      static_cast<std::size_t>(most * kNumStepScalars) * byte_size(master), "step scalars");
  member_scalars_ = member_memory_.view({most, kNumStepScalars}, master);
}

// Each trained tensor of the whole model has its place among the partials of the norm, the same one on all ranks.
std::int64_t Optimizer::place_partials(const ParameterStore& whole) {
  std::unordered_map<std::string, std::int64_t> first_of;  // by the first parameter of a storage
  std::int64_t all = 0;
  for (std::size_t s = 0; s < whole.num_storages(); ++s) {
    const auto ids = whole.params_of(storage_id(s));
    if (!ids.empty()) first_of[whole.spec(ids.front()).name] = all;
    for (const ParamId id : ids)
      all += whole.ever_trained(id) ? all_members(whole.spec(id)) : 0;
  }
  for (std::size_t s = 0; s < params_.num_storages(); ++s) {
    const auto ids = params_.params_of(storage_id(s));
    first_slot_.push_back(ids.empty() ? 0 : first_of.at(params_.spec(ids.front()).name));
  }
  return all;
}

void Optimizer::allocate_state(DType master) {
  states_.resize(params_.num_storages());
  std::int64_t elements = 0;
  // Counts first, then hands out.
  for (const bool counting : {true, false}) {
    TensorView all;
    if (!counting) {
      memory_ = params_.allocate(static_cast<std::size_t>(elements) * byte_size(master),
                                 "optimizer state");
      all = memory_.view({elements}, master);
    }
    std::int64_t at = 0;
    const auto take = [&](TensorView& view, std::int64_t n) {
      if (!counting) view = all.rows(at, at + n);
      at += aligned(n);
    };
    for (std::size_t s = 0; s < states_.size(); ++s) {
      const auto ids = params_.params_of(storage_id(s));
      if (ids.empty()) continue;
      const Entry& first = entry(ids.front());
      for (const ParamId id : ids)
        MOESAIC_CHECK(entry(id).trained == first.trained && entry(id).muon == first.muon,
                      "the parameters of a storage are optimised alike");
      const FlatRange& own = params_.own_range(storage_id(s));
      const std::int64_t n = own.end - own.begin;
      if (n == 0) continue;
      if (first.trained && first.muon) take(states_[s].momentum, n);
      if (first.trained && !first.muon) {
        take(states_[s].m, n);
        take(states_[s].v, n);
      }
      if (options_.ema_decay) take(states_[s].average, n);
    }
    elements = at;
  }
}

// Device memory starts with anything.
void Optimizer::clear_state() {
  Stream stream(params_.device(),
                "optimizer state",
                params_.is_pretend() ? Stream::Mode::dry : Stream::Mode::immediate);
  if (memory_.bytes() > 0)
    zero_tensor(memory_.view({static_cast<std::int64_t>(memory_.bytes())}, DType::u8), stream);
  if (!params_.is_pretend()) stream.synchronize();
}

std::vector<MemoryUse> Optimizer::memory_use() const {
  return {{"optimizer state", memory_.bytes()},
          {"whole matrices", whole_->bytes()},
          {"step scalars", small_.bytes() + member_memory_.bytes()}};
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
    if (!e.trained || params_.frozen(id_of(i))) continue;
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
}

// Of all tensors of a storage on all ranks: the parameters of its first member, then those of the second, …
TensorView Optimizer::partials_of(StorageId id) const {
  const auto ids = params_.params_of(id);
  const std::int64_t begin = first_slot_[static_cast<std::size_t>(id.index)];
  return partials_.rows(
      begin,
      begin + all_members(params_.spec(ids.front())) * static_cast<std::int64_t>(ids.size()));
}

// Of one of those on this rank, counted in the same way from 0.
TensorView Optimizer::partial_of(StorageId id, std::int64_t tensor) const {
  const auto ids = params_.params_of(id);
  const auto each = static_cast<std::int64_t>(ids.size());
  const std::int64_t n = params_.number_of(ids.front(), tensor / each) * each + tensor % each;
  return partials_of(id).rows(n, n + 1);
}

// The partials of what this rank owns of a storage.
void Optimizer::sum_squares(Backend& backend, StorageId id) {
  const auto ids = params_.params_of(id);
  const auto per_member = static_cast<std::int64_t>(ids.size());
  const std::int64_t tensors = params_.members_here(ids.front()) * per_member;
  const TensorView grad = params_.grad(id);
  const FlatRange& own = params_.own_range(id);
  if (own.begin == own.end) return;
  const std::int64_t each = params_.block_of_member(ids.front()).extent.numel();
  if (!grad.empty() && is_uniform(id) && own.begin % each == 0 && own.end % each == 0) {
    const std::int64_t first = own.begin / each, end = own.end / each;
    const ConstTensorView numbers = params_.tensor_numbers(id);
    const std::int64_t begin = params_.number_of(ids.front(), 0) * per_member;
    const TensorView all = partials_of(id);
    return run(
        backend,
        SumOfSquares{.partials = numbers.empty() ? all.rows(begin + first, begin + end) : all,
                     .x = grad.reshaped({grad.numel()}).rows(own.begin, own.end),
                     .index = numbers.empty() ? numbers : numbers.rows(first, end)});
  }
  for (std::int64_t i = 0; i < tensors; ++i) {
    const ParamId p = ids[static_cast<std::size_t>(i % per_member)];
    if (params_.own_piece(p, i / per_member).is_empty()) continue;
    const TensorView partial = partial_of(id, i);
    const TensorView one = params_.own_gradient(p, i / per_member);
    if (one.empty()) {
      run(backend, Fill{.y = partial, .value = 0.0});
    } else {
      run(backend, SumOfSquares{.partials = partial, .x = one});
    }
  }
}

void Optimizer::clip(Backend& backend, ConstTensorView guarded, Communicator* world) {
  // Every partial of the whole model has its place on all ranks. Whoever speaks for a tensor fills it in; where the state
  // is sharded each owner does for its piece, and the pieces of a tensor are added in the order of ranks.
  if (split_) zero_tensor(partials_, stream_of(backend));
  for (std::size_t s = 0; s < states_.size(); ++s) {
    const auto ids = params_.params_of(storage_id(s));
    if (ids.empty() || !entry(ids.front()).trained) continue;
    const ParamId first = ids.front();
    if (split_ && !params_.is_sharded(first) && !params_.speaks_for(first)) continue;
    sum_squares(backend, storage_id(s));
  }
  if (split_ && world != nullptr) world->all_reduce(partials_, ReduceOp::sum, stream_of(backend));
  run(backend,
      ClipFactor{.scalars = scalars(),
                 .norm = norm_,
                 .partials = partials_,
                 .limit = options_.clip_grad_norm});
  run(backend, GuardFinite{.scalars = scalars(), .values = guarded});
  // The other groups differ in their bias corrections only.
  for (std::size_t g = 1; g < group_updates_.size(); ++g) {
    for (const StepScalar s : {StepScalar::clip_factor, StepScalar::skip}) {
      const auto row = static_cast<std::int64_t>(g);
      const TensorView to = scalars_.rows(row, row + 1)
                                .reshaped({kNumStepScalars})
                                .rows(index_of(s), index_of(s) + 1);
      copy_tensor(to, scalars().rows(index_of(s), index_of(s) + 1), stream_of(backend));
    }
  }
}

void Optimizer::update_storage(Backend& backend, StorageId id) {
  const auto ids = params_.params_of(id);
  if (ids.empty() || !entry(ids.front()).trained) return;
  const ParamId first = ids.front();
  const ParameterSpec& spec = params_.params()[static_cast<std::size_t>(first.index)];
  const Entry& e = entry(first);
  const bool by_use = !member_scalars_.empty() && spec.use_counts.valid();
  const bool by_blocks = e.muon && options_.muon_per_head && !spec.blocks.empty();
  const bool in_parts = e.muon && whole_->is_split(first);
  if (by_use || by_blocks || in_parts || !is_uniform(id)) {
    for (const ParamId p : ids) {
      if (!params_.frozen(p)) update_family(backend, p);
    }
    return;
  }
  if (params_.frozen(first)) return;
  const FlatRange& own = params_.own_range(id);
  const std::int64_t n = own.end - own.begin;
  if (n == 0) return;
  // All members and all parameters of each: matrices of one shape, one after the other.
  const State& state = state_of(first);
  const Shape& block = params_.block_of_member(first).extent;
  MOESAIC_CHECK(!e.muon || (own.begin % block.numel() == 0 && n % block.numel() == 0),
                "Muon needs whole matrices");
  const Shape shape = e.muon ? Shape{n / block.numel(), block[0], block[1]} : Shape{n};
  const auto owned = [&](const TensorView& whole) {
    return whole.reshaped({whole.numel()}).rows(own.begin, own.end).reshaped(shape);
  };
  update_tensors(backend,
                 e,
                 {.master = reshaped(params_.storage_master(id), shape),
                  .compute = params_.masters_are_weights(first) ? TensorView()
                                                                : owned(params_.storage_weight(id)),
                  .remainder = reshaped(params_.storage_remainder(id), shape),
                  .gradient = owned(params_.grad(id)),
                  .m = reshaped(state.m, shape),
                  .v = reshaped(state.v, shape),
                  .momentum = reshaped(state.momentum, shape)},
                 spec,
                 {},
                 scalars_.rows(e.group, e.group + 1).reshaped({kNumStepScalars}));
}

void Optimizer::update_family(Backend& backend, ParamId id) {
  const ParameterSpec& spec = params_.params()[static_cast<std::size_t>(id.index)];
  const std::int64_t group = entries_[static_cast<std::size_t>(id.index)].group,
                     members = params_.members_here(id);
  const ConstTensorView scalars = scalars_.rows(group, group + 1).reshaped({kNumStepScalars});
  const bool by_use = !member_scalars_.empty() && spec.use_counts.valid();
  if (by_use) {
    const ConstTensorView counts = params_.buffer(spec.use_counts),
                          numbers = params_.numbers_here(id);
    const std::int64_t first = params_.number_of(id, 0);
    run(backend,
        MemberScalars{.rows = member_scalars_.rows(0, members),
                      .scalars = scalars,
                      .counts = numbers.empty() ? counts.rows(first, first + members) : counts,
                      .numbers = numbers});
  }
  for (std::int64_t e = 0; e < members; ++e) {
    update_one(backend,
               id,
               e,
               by_use ? member_scalars_.rows(e, e + 1).reshaped({kNumStepScalars}) : scalars);
  }
  if (by_use) update_split_matrices(backend);  // the next family has other scalars there
}

void Optimizer::update_one(Backend& backend,
                           ParamId id,
                           std::int64_t member,
                           ConstTensorView scalars) {
  if (params_.own_piece(id, member).is_empty()) return;
  MOESAIC_CHECK(!entry(id).muon || params_.owns_whole(id, member), "Muon needs whole matrices");
  const std::vector<RowBlock> blocks = blocks_here(id);
  if (entry(id).muon && whole_->is_split(id) && blocks.empty())
    return put_off(backend, {id, member, scalars});
  update_tensors(backend, entry(id), tensors_of(id, member), params_.spec(id), blocks, scalars);
}

Optimizer::Tensors Optimizer::tensors_of(ParamId id, std::int64_t member) const {
  const State& state = state_of(id);
  return {
      .master = params_.master(id, member),
      .compute = params_.masters_are_weights(id) ? TensorView() : params_.own_weight(id, member),
      .remainder = params_.remainder(id, member),
      .gradient = params_.own_gradient(id, member),
      .m = params_.part_of(state.m, id, member),
      .v = params_.part_of(state.v, id, member),
      .momentum = params_.part_of(state.momentum, id, member)};
}

// Heads are split whole, so that a rank has whole blocks.
std::vector<RowBlock> Optimizer::blocks_here(ParamId id) const {
  std::vector<RowBlock> here;
  if (!options_.muon_per_head) return here;
  const LocalBlock& block = params_.block_of_member(id);
  const std::int64_t begin = block.offset[0], end = begin + block.extent[0];
  for (const RowRange& r : params_.spec(id).blocks) {
    if (begin <= r.begin && r.end <= end) here.push_back({r.begin - begin, r.end - begin});
  }
  return here;
}

// Ranks along the axis that splits a matrix own the same ones, and update as many of them at a time as they are. Each axis has
// its own list: ranks that share the one axis may own other matrices along the other, and must still take the same turns.
void Optimizer::put_off(Backend& backend, const SplitUpdate& update) {
  const Axis axis = whole_->axis(update.id);
  std::vector<SplitUpdate>& updates = split_updates_[axis];
  updates.push_back(update);
  if (static_cast<std::int64_t>(updates.size()) == params_.position().extent(axis))
    update_split_matrices(backend, updates);
}

void Optimizer::update_split_matrices(Backend& backend) {
  for (auto& [axis, updates] : split_updates_)
    update_split_matrices(backend, updates);
}

void Optimizer::update_split_matrices(Backend& backend, std::vector<SplitUpdate>& updates) {
  std::vector<WholeMatrices::Blocks> blocks;
  for (const SplitUpdate& u : updates) {
    const Tensors own = tensors_of(u.id, u.member);
    blocks.push_back(
        {u.id,
         {{{own.master}, {own.compute}, {own.remainder}, {own.gradient, true}, {own.momentum}}}});
  }
  whole_->work(backend, mesh_, blocks, [&](std::size_t i, const WholeMatrices::Whole& whole) {
    const SplitUpdate& u = updates[i];
    update_tensors(backend,
                   entry(u.id),
                   {.master = whole[0],
                    .compute = whole[1],
                    .remainder = whole[2],
                    .gradient = whole[3],
                    .m = {},
                    .v = {},
                    .momentum = whole[4]},
                   params_.spec(u.id),
                   {},
                   u.scalars);
  });
  updates.clear();
}

void Optimizer::update_tensors(Backend& backend,
                               const Entry& e,
                               const Tensors& t,
                               const ParameterSpec& spec,
                               const std::vector<RowBlock>& blocks,
                               ConstTensorView scalars) {
  const double decay = spec.decay ? options_.weight_decay : 0.0;
  if (e.muon) {
    const Precision& precision = params_.precision();
    const bool bf16_products = precision.master == DType::f32 &&
                               options_.bf16_products.value_or(precision.compute == DType::bf16);
    run(backend,
        MuonUpdate{.w = t.master,
                   .momentum = t.momentum,
                   .w_compute = t.compute,
                   .remainder = t.remainder,
                   .dw = t.gradient,
                   .scalars = scalars,
                   .blocks = blocks,
                   .lr_scale = e.lr_scale,
                   .weight_decay = decay,
                   .mu = options_.muon_momentum,
                   .nesterov = options_.muon_nesterov,
                   .num_iterations = options_.ns_steps,
                   .bf16_products = bf16_products});
    return;
  }
  run(backend,
      AdamW{.w = t.master,
            .m = t.m,
            .v = t.v,
            .w_compute = t.compute,
            .remainder = t.remainder,
            .dw = t.gradient,
            .scalars = scalars,
            .lr_scale = e.lr_scale,
            .weight_decay = decay,
            .beta1 = options_.beta1,
            .beta2 = options_.beta2,
            .eps = options_.eps});
}

void Optimizer::update(Backend& backend, const Mesh* mesh) {
  mesh_ = mesh;
  for (std::size_t s = 0; s < states_.size(); ++s)
    update_storage(backend, storage_id(s));
  update_split_matrices(backend);
}

void Optimizer::average(Backend& backend) {
  if (!options_.ema_decay) return;
  for (std::size_t s = 0; s < states_.size(); ++s) {
    if (states_[s].average.empty()) continue;
    const StorageId id = storage_id(s);
    const Shape& shape = states_[s].average.shape();
    const TensorView remainder = params_.storage_remainder(id);
    const FlatRange& own = params_.own_range(id);
    const TensorView all = params_.storage_weight(id);
    const TensorView w = remainder.empty() ? params_.storage_master(id)
                                           : all.reshaped({all.numel()}).rows(own.begin, own.end);
    // The first average is the weight itself.
    run(backend,
        MovingAverage{.average = states_[s].average,
                      .w = w.reshaped(shape),
                      .remainder = reshaped(remainder, shape),
                      .scalars = scalars(),
                      .decay = updates_ == 0 ? 0.0 : *options_.ema_decay});
  }
}

void Optimizer::qk_clip(Backend& backend, const std::vector<MlaAttention*>& layers) {
  if (!options_.qk_clip_tau) return;
  const auto is_split = [&](ParamId id) { return !params_.remainder(id, 0).empty(); };
  for (MlaAttention* layer : layers) {
    const ParamId q = params_.find(layer->query_matrix()),
                  kv = params_.find(layer->key_value_matrix());
    if (params_.frozen(q) || params_.frozen(kv)) continue;  // a frozen weight keeps its bits
    if (params_.own_piece(q, 0).is_empty()) continue;       // another rank's
    MOESAIC_CHECK(params_.owns_whole(q, 0) && params_.owns_whole(kv, 0),
                  "QK-clip needs both projections on one rank");
    const auto& o = layer->options();
    const auto master = [&](ParamId id) {
      return is_split(id) ? params_.weight(id, 0) : params_.master(id, 0);
    };
    run(backend,
        QkClip{.q_weight = master(q),
               .kv_b_weight = master(kv),
               .q_remainder = params_.remainder(q, 0),
               .kv_b_remainder = params_.remainder(kv, 0),
               .max_logit = layer->max_logit_here(params_),
               .skip = step_scalar(scalars(), StepScalar::skip),
               .dn = o.qk_nope_dim,
               .dr = o.qk_rope_dim,
               .dv = o.v_dim,
               .tau = *options_.qk_clip_tau});
    for (const ParamId id : {q, kv}) {
      if (!params_.masters_are_weights(id) && !is_split(id))
        run(backend, Cast{.y = params_.weight(id, 0), .x = params_.master(id, 0)});
    }
  }
}

void Optimizer::download_outcome(Stream& stream) {
  // Groups differ in their counts of updates only, and rows of groups that do not exist were never written.
  copy_tensor(host_scalars_.rows(0, 1), scalars_.rows(0, 1), stream);
  copy_tensor(host_norm_, norm_, stream);
}

Optimizer::Outcome Optimizer::outcome() const {
  const int skip = index_of(StepScalar::skip);
  const double flag = host_scalars_.dtype() == DType::f64
                          ? host_scalars_.as<double>()[skip]
                          : static_cast<double>(host_scalars_.as<float>()[skip]);
  return {host_norm_.as<double>()[0], flag != 0.0};
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
    entries_[i].updates += entries_[i].trained && !params_.frozen(id_of(i)) ? 1 : 0;
}

std::optional<StateTensor::Place> place_in_whole(const ParameterStore& params,
                                                 ParamId id,
                                                 std::int64_t member) {
  const LocalBlock block = params.own_piece(id, member).block;
  const Shape& whole = params.spec(id).shape;
  if (block.extent == whole) return std::nullopt;
  return StateTensor::Place{whole, block.offset};
}

std::vector<StateTensor> Optimizer::state() const {
  std::vector<StateTensor> all;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const ParamId id = id_of(i);
    const State& own = state_of(id);
    for (std::int64_t k = 0; k < params_.members_here(id); ++k) {
      if (params_.own_piece(id, k).is_empty()) continue;
      const std::string name = params_.member_name(id, k);
      const auto add = [&](const char* kind, const TensorView& view) {
        if (!view.empty())
          all.push_back(
              {kind + name, params_.part_of(view, id, k), {}, place_in_whole(params_, id, k)});
      };
      add("optimizer/m/", own.m);
      add("optimizer/v/", own.v);
      add("optimizer/momentum/", own.momentum);
      add("ema/", own.average);
    }
  }
  return all;
}

std::vector<TensorView> Optimizer::state_of_storage(StorageId id) const {
  const State& own = states_[static_cast<std::size_t>(id.index)];
  const Entry& of = entry(params_.params_of(id).front());
  std::vector<TensorView> kinds;
  if (of.trained && of.muon) kinds = {own.momentum};
  if (of.trained && !of.muon) kinds = {own.m, own.v};
  if (options_.ema_decay) kinds.push_back(own.average);
  return kinds;
}

void Optimizer::save_counters(StateValues& values) const {
  values.integers["optimizer.updates"] = updates_;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    // Only what differs from the rule: parameters that were frozen in some of the updates.
    if (entries_[i].trained && entries_[i].updates != updates_)
      values.integers["optimizer.updates_of." + params_.params()[i].name] = entries_[i].updates;
  }
}

void Optimizer::load_counters(const StateValues& values) {
  const auto it = values.integers.find("optimizer.updates");
  if (it == values.integers.end())
    throw InputError("the checkpoint's manifest holds no optimizer.updates");
  updates_ = it->second;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const auto own = values.integers.find("optimizer.updates_of." + params_.params()[i].name);
    entries_[i].updates =
        own == values.integers.end() ? (entries_[i].trained ? updates_ : 0) : own->second;
  }
}

}  // namespace moesaic
