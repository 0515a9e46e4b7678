#include "core/train/expert_move.h"

#include <algorithm>

namespace moesaic {
namespace {

constexpr std::size_t kMostBytes = std::size_t{32} << 20;  // on the way, each direction

std::int64_t members_of(const ParameterStore& params, StorageId id) {
  return params.members_here(params.params_of(id).front());
}

std::int64_t slot_of(const ParameterStore& params, StorageId id) {
  return params.storage_shape(id).numel() / members_of(params, id);
}

bool has_places(const ParameterStore& params, StorageId id) {
  const auto ids = params.params_of(id);
  return !ids.empty() && params.spec(ids.front()).places.valid();
}

}  // namespace

std::size_t ExpertMove::memory_bytes(const ParameterStore& params) {
  if (params.position().extent(Axis::ep) == 1) return 0;
  std::size_t largest = 0;
  for (std::size_t i = 0; i < params.num_storages(); ++i) {
    const StorageId id{static_cast<std::int32_t>(i)};
    if (!has_places(params, id)) continue;
    const bool is_offloaded = params.has_tiered_weights(id);  // goes one by one
    const auto elements = static_cast<std::size_t>(is_offloaded ? slot_of(params, id)
                                                                : params.storage_shape(id).numel());
    largest = std::max(largest, elements * byte_size(params.precision().master));
    // A window holds at least one element of every slot.
    MOESAIC_CHECK(static_cast<std::size_t>(members_of(params, id)) * 8 <= kMostBytes,
                  "more experts on a rank than a window holds");
  }
  return 2 * std::min(largest, kMostBytes);
}

ExpertMove::ExpertMove(ParameterStore& params, const Optimizer& optimizer, Communicator& stage)
    : params_(params),
      optimizer_(optimizer),
      stage_(stage),
      outgoing_(params.allocate(memory_bytes(params) / 2, "experts on their way")),
      incoming_(params.allocate(memory_bytes(params) / 2, "experts on their way")) {
  if (params.tiers() != nullptr)
    offloaded_.emplace(
        params, stage, incoming_.view({static_cast<std::int64_t>(incoming_.bytes())}, DType::u8));
}

std::int64_t ExpertMove::move(PlacesId id, std::span<const std::int32_t> places, Stream& stream) {
  const std::vector<std::int32_t> before(params_.places(id).begin(), params_.places(id).end());
  std::int64_t bytes = 0;
  for (std::size_t s = 0; s < params_.num_storages(); ++s) {
    const StorageId storage{static_cast<std::int32_t>(s)};
    const auto ids = params_.params_of(storage);
    if (ids.empty() || params_.spec(ids.front()).places.index != id.index) continue;
    bytes += move_storage(storage,
                          {.before = before,
                           .after = places,
                           .ranks = params_.position().extent(Axis::ep),
                           .slot = slot_of(params_, storage)},
                          stream);
  }
  params_.set_places(id, places, stream);
  return bytes;
}

// Weights are on all ranks with the same experts; the rest is where its owner keeps it.
std::int64_t ExpertMove::move_storage(StorageId id, const MemberMoves& moves, Stream& stream) {
  if (params_.has_tiered_weights(id))
    return offloaded_->move_weights(id, moves.before, moves.after, stream) +
           offloaded_->move_state(id, moves.before, moves.after, stream);
  const ParamId first = params_.params_of(id).front();
  const TensorView weight = params_.storage_weight(id);
  const int copies = params_.position().extent(Axis::edp);
  MemberMoves whole = moves, kept = moves;
  whole.owners = {{0, weight.numel()}};
  if (params_.is_sharded(first)) {
    for (int owner = 0; owner < copies; ++owner)
      kept.owners.push_back(params_.range_of_owner(id, owner));
  } else {
    kept.owners = whole.owners;
  }
  std::int64_t bytes = move_tensor({weight.dtype(), weight, 0}, whole, stream) * copies;
  if (params_.has_tiered_state(id))
    return bytes * params_.position().extent(Axis::etp) +
           offloaded_->move_state(id, moves.before, moves.after, stream);
  // A rank may keep nothing of this storage; it takes part all the same.
  const std::int64_t begin = params_.own_range(id).begin;
  const Precision& precision = params_.precision();
  std::vector<Kept> owned;
  for (const TensorView& state : optimizer_.state_of_storage(id))
    owned.push_back({precision.master, state, begin});
  if (!params_.masters_are_weights(first)) {
    owned.push_back(precision.split_masters
                        ? Kept{DType::u16, params_.storage_remainder(id), begin}
                        : Kept{precision.master, params_.storage_master(id), begin});
  }
  for (const Kept& tensor : owned)
    bytes += move_tensor(tensor, kept, stream) * (params_.is_sharded(first) ? 1 : copies);
  return bytes * params_.position().extent(Axis::etp);
}

std::int64_t ExpertMove::move_tensor(const Kept& tensor, const MemberMoves& moves, Stream& stream) {
  const auto here = static_cast<std::int64_t>(moves.before.size()) / moves.ranks,
             element = static_cast<std::int64_t>(byte_size(tensor.dtype)),
             window = static_cast<std::int64_t>(outgoing_.bytes()) / (here * element);
  std::int64_t bytes = 0;
  for (std::int64_t at = 0; at < moves.slot; at += window) {
    const auto pieces = pieces_to_move(moves, {at, std::min(at + window, moves.slot)});
    for (const MemberPiece& piece : pieces)
      bytes += piece.from == piece.to ? 0 : piece.count * element;
    exchange(tensor, moves.owners.size() > 1, pieces, stream);
  }
  return bytes;
}

// What leaves is copied before anything arrives, so that slots may change places in any way.
void ExpertMove::exchange(const Kept& tensor,
                          bool is_shared,
                          std::vector<MemberPiece> pieces,
                          Stream& stream) {
  const MeshPosition& p = params_.position();
  const MemberHolder me{p.coordinate(Axis::ep), is_shared ? p.coordinate(Axis::edp) : 0};
  const auto flat = [&](std::int64_t begin, std::int64_t count) {
    return tensor.view.reshaped({tensor.view.numel()})
        .rows(begin - tensor.begin, begin - tensor.begin + count);
  };
  // Stages are consecutive ranks: ((edp x EP) + ep) x ETP + etp.
  const auto peer = [&](const MemberHolder& holder) {
    const int owner = is_shared ? holder.owner : p.coordinate(Axis::edp);
    return (owner * p.extent(Axis::ep) + holder.rank) * p.extent(Axis::etp) +
           p.coordinate(Axis::etp);
  };
  const auto size = static_cast<std::int64_t>(byte_size(tensor.dtype));
  const auto part = [&](const Buffer& memory, std::int64_t begin, std::int64_t count) {
    return memory.view({count}, tensor.dtype, static_cast<std::size_t>(begin * size));
  };
  // Between any two ranks one message, in the order of the list on both sides.
  std::stable_sort(pieces.begin(), pieces.end(), [&](const auto& a, const auto& b) {
    return std::pair(peer(a.from), peer(a.to)) < std::pair(peer(b.from), peer(b.to));
  });
  std::vector<OutgoingMessage> sends;
  std::vector<IncomingMessage> receives;
  std::vector<std::pair<TensorView, TensorView>> arrivals;  // to, from
  std::int64_t out = 0, in = 0;
  for (std::size_t i = 0; i < pieces.size();) {
    const MemberPiece& first = pieces[i];
    const bool leaves = first.from == me, comes = first.to == me;
    const std::int64_t out_begin = out, in_begin = in;
    for (; i < pieces.size() && pieces[i].from == first.from && pieces[i].to == first.to; ++i) {
      const MemberPiece& piece = pieces[i];
      if (comes)
        arrivals.emplace_back(
            flat(piece.to_begin, piece.count),
            leaves ? part(outgoing_, out, piece.count) : part(incoming_, in, piece.count));
      if (leaves) {
        copy_tensor(part(outgoing_, out, piece.count), flat(piece.from_begin, piece.count), stream);
        out += piece.count;
      }
      if (comes && !leaves) in += piece.count;
    }
    if (leaves && !comes)
      sends.push_back({part(outgoing_, out_begin, out - out_begin), peer(first.to)});
    if (comes && !leaves)
      receives.push_back({part(incoming_, in_begin, in - in_begin), peer(first.from)});
  }
  stage_.exchange(sends, receives, stream);
  for (const auto& [to, from] : arrivals)
    copy_tensor(to, from, stream);
}

}  // namespace moesaic
