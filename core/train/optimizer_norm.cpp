// The norm of all gradients, and what follows from it.
#include <algorithm>
#include <string>
#include <unordered_map>

#include "core/nn/row_blocks.h"
#include "core/train/optimizer.h"
#include "core/train/store_ids.h"
#include "kernels/ops/clip.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/guard.h"

namespace moesaic {
namespace {
std::int64_t all_members(const ParameterSpec& spec) {
  return std::max<std::int64_t>(1, spec.members);
}

// Partials of one tensor: whoever owns what of it, each is the sum of one owner.
std::int64_t partials_of_tensor(const ParameterStore& params, ParamId id) {
  return params.spec(id).members > 0 ? 1 : RowBlocks(params.block_of_member(id).extent).count;
}
// Of all ranks' members.
std::int64_t partials_of_parameter(const ParameterStore& params, ParamId id) {
  return all_members(params.spec(id)) * partials_of_tensor(params, id);
}
}  // namespace

// Each trained tensor of the whole model has its places among the partials of the norm, the same ones on all ranks.
std::int64_t Optimizer::place_partials(const ParameterStore& whole) {
  std::unordered_map<std::string, std::int64_t> first_of;  // by the first parameter of a storage
  std::int64_t all = 0;
  for (std::size_t s = 0; s < whole.num_storages(); ++s) {
    const auto ids = whole.params_of(storage_id(s));
    if (!ids.empty()) first_of[whole.spec(ids.front()).name] = all;
    for (const ParamId id : ids)
      all += whole.ever_trained(id) ? partials_of_parameter(whole, id) : 0;
  }
  for (std::size_t s = 0; s < params_.num_storages(); ++s) {
    const auto ids = params_.params_of(storage_id(s));
    first_slot_.push_back(ids.empty() ? 0 : first_of.at(params_.spec(ids.front()).name));
  }
  return all;
}

// Of all tensors of a storage on all ranks: the parameters of its first member, then those of the second, …
TensorView Optimizer::partials_of(StorageId id) const {
  const std::int64_t begin = first_slot_[static_cast<std::size_t>(id.index)];
  std::int64_t end = begin;
  for (const ParamId p : params_.params_of(id))
    end += partials_of_parameter(params_, p);
  return partials_.rows(begin, end);
}

// The partials of one of those on this rank, counted in the same way from 0.
TensorView Optimizer::partials_of(StorageId id, std::int64_t tensor) const {
  const auto ids = params_.params_of(id);
  const auto each = static_cast<std::int64_t>(ids.size());
  std::int64_t begin = params_.number_of(ids.front(), tensor / each) * each;
  for (std::int64_t i = 0; i < tensor % each; ++i)
    begin += partials_of_tensor(params_, ids[static_cast<std::size_t>(i)]);
  return partials_of(id).rows(
      begin, begin + partials_of_tensor(params_, ids[static_cast<std::size_t>(tensor % each)]));
}

// The partials of what this rank owns of a storage.
void Optimizer::sum_squares(Backend& backend, StorageId id) {
  const auto ids = params_.params_of(id);
  const auto per_member = static_cast<std::int64_t>(ids.size());
  const std::int64_t tensors = params_.members_here(ids.front()) * per_member;
  const TensorView grad = params_.grad(id);
  const FlatRange& own = params_.own_range(id);
  if (own.begin == own.end) return;
  const std::int64_t each = params_.block_of_member(ids.front()).extent.numel() /
                            partials_of_tensor(params_, ids.front());
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
  for (std::int64_t i = 0; i < tensors; ++i)
    sum_squares_of_piece(backend, id, i);
}

// The same of one tensor, counted as in partials_of().
void Optimizer::sum_squares_of_piece(Backend& backend, StorageId id, std::int64_t tensor) {
  const auto ids = params_.params_of(id);
  const auto per_member = static_cast<std::int64_t>(ids.size());
  const ParamId p = ids[static_cast<std::size_t>(tensor % per_member)];
  const std::int64_t member = tensor / per_member;
  const ParameterStore::Piece piece = params_.own_piece(p, member);
  if (piece.is_empty()) return;
  const LocalBlock& whole = params_.block_of_member(p);
  const std::int64_t row = whole.extent.numel() / whole.extent[0];
  const TensorView all = partials_of(id, tensor);
  const std::int64_t each = whole.extent.numel() / all.numel();
  const std::int64_t begin = (piece.block.offset[0] - whole.offset[0]) * row,
                     end = begin + piece.end - piece.begin;
  MOESAIC_CHECK(begin % each == 0 && end % each == 0,
                "'" + params_.spec(p).name + "' is cut inside a block of rows");
  const TensorView partials = all.rows(begin / each, end / each);
  const TensorView gradient = params_.own_gradient(p, member);
  if (gradient.empty()) {
    run(backend, Fill{.y = partials, .value = 0.0});
  } else {
    run(backend, SumOfSquares{.partials = partials, .x = gradient});
  }
}

void Optimizer::guard_losses(Backend& backend, ConstTensorView guarded) {
  run(backend, GuardFinite{.scalars = scalars(), .values = guarded});
  share_skip(backend, scalars_);
}

// The other groups of parameters differ in their bias corrections only.
void Optimizer::share_skip(Backend& backend, const TensorView& scalars) {
  const auto slot = [&](std::size_t group, StepScalar s) {
    const auto row = static_cast<std::int64_t>(group);
    return scalars.rows(row, row + 1)
        .reshaped({kNumStepScalars})
        .rows(index_of(s), index_of(s) + 1);
  };
  for (std::size_t g = 1; g < group_updates_.size(); ++g)
    for (const StepScalar s : {StepScalar::clip_factor, StepScalar::skip})
      copy_tensor(slot(g, s), slot(0, s), stream_of(backend));
}

void Optimizer::clip(Backend& backend, ConstTensorView guarded, Communicator* world) {
  // Every partial of the whole model has its place on all ranks. Whoever speaks for a tensor fills in its partials; where the
  // state is sharded the owners do, each those of its own blocks of rows. What the layout splits is added in the order of ranks.
  for (std::size_t s = 0; s < states_.size(); ++s) {
    if (!sums_squares(storage_id(s)) || summed_[s] != 0) continue;
    if (params_.has_tiered_weights(storage_id(s))) {
      sum_squares_of_members(backend, storage_id(s));
    } else {
      sum_squares(backend, storage_id(s));
    }
  }
  if (split_ && world != nullptr) world->all_reduce(partials_, ReduceOp::sum, stream_of(backend));
  run(backend,
      ClipFactor{.scalars = scalars(),
                 .norm = norm_,
                 .partials = partials_,
                 .limit = options_.clip_grad_norm});
  run(backend, GuardFinite{.scalars = scalars(), .values = guarded});
  share_skip(backend, scalars_);
}

}  // namespace moesaic
