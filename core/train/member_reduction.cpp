#include "core/train/member_reduction.h"

#include <algorithm>

#include "core/nn/expert_tiers.h"
#include "core/train/store_ids.h"

namespace moesaic {

MemberReduction::MemberReduction(const ParameterStore& params, const Mesh* mesh) : params_(params) {
  for (std::size_t s = 0; s < params.num_storages(); ++s) {
    const StorageId id = storage_id(s);
    if (!params.has_tiered_weights(id)) continue;
    const std::vector<Axis> axes =
        params.spec(params.params_of(id).front()).placement.gradient_axes();
    const MeshPosition::InGroup group = params.position().in_group(axes);
    const Shape& shape = params.storage_shape(id);
    if (group.size > 1)
      shared_.push_back({id,
                         mesh == nullptr ? nullptr : mesh->group(axes).comm(),
                         group.size,
                         group.index,
                         {shape[1], shape[2]}});
  }
}

// Where state is not sharded every rank keeps all of it, and members go in any order.
std::vector<MemberReduction::Turn> MemberReduction::turns(const Shared& shared) const {
  const std::int64_t each = shared.member.numel();
  const bool is_sharded = params_.is_sharded(params_.params_of(shared.id).front());
  const std::int64_t all = params_.storage_shape(shared.id)[0];
  std::vector<RowRange> owned;
  for (int p = 0; p < shared.ranks; ++p) {
    const FlatRange range = params_.range_of_owner(shared.id, p);
    owned.push_back(is_sharded ? RowRange{range.begin / each, range.end / each}
                               : RowRange{all * p / shared.ranks, all * (p + 1) / shared.ranks});
  }
  std::vector<Turn> turns;
  for (std::int64_t k = 0;; ++k) {
    Turn turn{.bounds = {0}};
    for (int p = 0; p < shared.ranks; ++p) {
      const RowRange& of = owned[static_cast<std::size_t>(p)];
      if (of.begin + k < of.end) {
        if (p == shared.here) turn.own = static_cast<std::int64_t>(turn.members.size());
        turn.members.push_back(of.begin + k);
      }
      turn.bounds.push_back(static_cast<std::int64_t>(turn.members.size()) * each);
    }
    if (turn.members.empty()) return turns;
    turns.push_back(std::move(turn));
  }
}

// [members of the turn, rows, cols], until the enclosing Mark ends.
TensorView MemberReduction::side_by_side(Backend& backend,
                                         const Shared& shared,
                                         const Turn& turn,
                                         DType dtype) {
  const auto n = static_cast<std::int64_t>(turn.members.size());
  return scratch_of(backend).take(
      {n, shared.member[0], shared.member[1]}, dtype, "experts of several ranks");
}

void MemberReduction::reduce(Backend& backend, const Shared& shared, const Turn& turn) {
  const Arena::Mark mark(scratch_of(backend));
  Stream& stream = stream_of(backend);
  ExpertTiers& tiers = *params_.tiers();
  const TensorView sums = side_by_side(backend, shared, turn, params_.precision().grad);
  const bool is_sharded = params_.is_sharded(params_.params_of(shared.id).front());
  const auto row = [&](std::int64_t i) { return sums.rows(i, i + 1).reshaped(shared.member); };
  const auto is_own = [&](std::int64_t i) { return !is_sharded || i == turn.own; };
  for (std::int64_t i = 0; i < sums.dim(0); ++i) {
    const std::int64_t& member = turn.members[static_cast<std::size_t>(i)];
    if (stream.mode() != Stream::Mode::dry && !tiers.has_gradient(shared.id, member)) {
      zero_tensor(row(i), stream);
      continue;
    }
    tiers.with_members(
        shared.id,
        {&member, 1},
        {.gradient = MemberAccess::read, .last_use_of_gradient = !is_own(i)},
        stream,
        [&](std::span<const MemberTensors> m) { copy_tensor(row(i), m[0].gradient, stream); });
  }
  if (shared.comm != nullptr) {
    if (is_sharded) {
      shared.comm->reduce_to_owners(sums, turn.bounds, ReduceOp::sum, stream);
    } else {
      shared.comm->all_reduce(sums, ReduceOp::sum, stream);
    }
  }
  for (std::int64_t i = 0; i < sums.dim(0); ++i) {
    if (!is_own(i)) continue;
    tiers.with_members(
        shared.id,
        {&turn.members[static_cast<std::size_t>(i)], 1},
        {.gradient = MemberAccess::replace},
        stream,
        [&](std::span<const MemberTensors> m) { copy_tensor(m[0].gradient, row(i), stream); });
  }
}

void MemberReduction::gather(Backend& backend, const Shared& shared, const Turn& turn) {
  const Arena::Mark mark(scratch_of(backend));
  Stream& stream = stream_of(backend);
  ExpertTiers& tiers = *params_.tiers();
  const Precision& precision = params_.precision();
  const DType dtype =
      params_.spec(params_.params_of(shared.id).front()).stored_as == StoredAs::compute
          ? precision.compute
          : precision.stats;
  const TensorView weights = side_by_side(backend, shared, turn, dtype);
  const auto row = [&](std::int64_t i) { return weights.rows(i, i + 1).reshaped(shared.member); };
  const auto with_weight = [&](std::int64_t i, MemberAccess access, const auto& work) {
    tiers.with_members(shared.id,
                       {&turn.members[static_cast<std::size_t>(i)], 1},
                       {.weight = access},
                       stream,
                       [&](std::span<const MemberTensors> m) { work(m[0].weight); });
  };
  if (turn.own >= 0)
    with_weight(turn.own, MemberAccess::read, [&](const TensorView& weight) {
      copy_tensor(row(turn.own), weight, stream);
    });
  if (shared.comm != nullptr) shared.comm->gather_from_owners(weights, turn.bounds, stream);
  for (std::int64_t i = 0; i < weights.dim(0); ++i) {
    if (i == turn.own) continue;
    with_weight(i, MemberAccess::replace, [&](const TensorView& weight) {
      copy_tensor(weight, row(i), stream);
    });
  }
}

bool MemberReduction::is_trained(const Shared& shared) const {
  const auto ids = params_.params_of(shared.id);
  return std::any_of(ids.begin(), ids.end(), [&](ParamId p) {
    return params_.ever_trained(p) && !params_.frozen(p);
  });
}

void MemberReduction::reduce(Backend& backend) {
  for (const Shared& shared : shared_) {
    if (!is_trained(shared)) continue;
    for (const Turn& turn : turns(shared))
      reduce(backend, shared, turn);
  }
}

void MemberReduction::gather_weights(Backend& backend, bool all) {
  for (const Shared& shared : shared_) {
    if (!params_.is_sharded(params_.params_of(shared.id).front())) continue;
    if (!all && !is_trained(shared)) continue;
    for (const Turn& turn : turns(shared))
      gather(backend, shared, turn);
  }
}

}  // namespace moesaic
