// New weights and state, storage by storage.
#include "core/train/optimizer.h"
#include "core/train/store_ids.h"
#include "kernels/ops/adamw.h"
#include "kernels/ops/clip.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/member_scalars.h"
#include "kernels/ops/muon.h"
#include "kernels/ops/qk_clip.h"

namespace moesaic {
namespace {
TensorView reshaped(const TensorView& view, const Shape& shape) {
  return view.empty() ? view : view.reshaped(shape);
}
}  // namespace

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
                 scalars_of(e));
}

void Optimizer::update_family(Backend& backend, ParamId id) {
  const ParameterSpec& spec = params_.params()[static_cast<std::size_t>(id.index)];
  const std::int64_t members = params_.members_here(id);
  const ConstTensorView scalars = scalars_of(entry(id));
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
  if (updates_in_parts(id)) return put_off(backend, {id, tensors_of(id, member), scalars});
  update_tensors(
      backend, entry(id), tensors_of(id, member), params_.spec(id), blocks_here(id), scalars);
}

bool Optimizer::updates_in_parts(ParamId id) const {
  return entry(id).muon && whole_->is_split(id) && blocks_here(id).empty();
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
    const Tensors& own = u.own;
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
  for (std::size_t s = 0; s < states_.size(); ++s) {
    if (!params_.has_tiered_state(storage_id(s))) update_storage(backend, storage_id(s));
  }
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
    run(backend,
        MovingAverage{.average = states_[s].average,
                      .w = w.reshaped(shape),
                      .remainder = reshaped(remainder, shape),
                      .scalars = scalars(),
                      .decay = average_decay()});
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

}  // namespace moesaic
