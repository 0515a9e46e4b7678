#include "core/train/offloaded_move.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "parallel/place_swaps.h"

namespace moesaic {
namespace {

const TierGroup& group_of(const ParameterStore& params, StorageId id) {
  for (const TierGroup& group : params.tiers()->groups())
    for (const StorageId s : group.storages)
      if (s.index == id.index) return group;
  throw InternalError("a storage that is not offloaded");
}

// All that there is of a member, in the order of MemberTensors.
std::vector<TensorView> tensors_of(const MemberTensors& member) {
  std::vector<TensorView> all{member.weight, member.master, member.remainder};
  all.insert(all.end(), member.state.begin(), member.state.end());
  std::erase_if(all, [](const TensorView& t) { return t.empty(); });
  return all;
}

TensorView bytes_of(const TensorView& tensor, std::int64_t begin, std::int64_t count) {
  return TensorView(tensor.data() + begin, DType::u8, {count}, tensor.device());
}

}  // namespace

OffloadedMove::OffloadedMove(const ParameterStore& params, Communicator& stage, TensorView arriving)
    : params_(params), stage_(stage), arriving_(arriving) {}

std::int64_t OffloadedMove::move_weights(StorageId id,
                                         std::span<const std::int32_t> before,
                                         std::span<const std::int32_t> after,
                                         Stream& stream) {
  const TierGroup& group = group_of(params_, id);
  return move({.id = id,
               .access = {.weight = MemberAccess::change},
               .bytes = {static_cast<std::int64_t>(group.weight_bytes)}},
              before,
              after,
              stream);
}

std::int64_t OffloadedMove::move_state(StorageId id,
                                       std::span<const std::int32_t> before,
                                       std::span<const std::int32_t> after,
                                       Stream& stream) {
  Moved moved{.id = id,
              .access = {.state = MemberAccess::change},
              .by_owners = params_.is_sharded(params_.params_of(id).front())};
  // Sections begin with what is beside the weight, as tensors_of() does; the others are all of one type.
  for (const auto& [name, bytes] : group_of(params_, id).state_sections)
    moved.bytes.push_back(static_cast<std::int64_t>(bytes));
  return moved.bytes.empty() ? 0 : move(moved, before, after, stream);
}

// Stages are consecutive ranks: ((edp x EP) + ep) x ETP + etp.
OffloadedMove::Holder OffloadedMove::holder(const Moved& moved, std::int32_t place) const {
  const MeshPosition& p = params_.position();
  const ParamId first = params_.params_of(moved.id).front();
  const std::int64_t here = params_.members_here(first), member = place % here;
  int copy = p.coordinate(Axis::edp);
  if (moved.by_owners) {
    const Shape& shape = params_.storage_shape(moved.id);
    const std::int64_t begin = member * shape[1] * shape[2];
    copy = 0;
    while (begin >= params_.range_of_owner(moved.id, copy).end)
      MOESAIC_CHECK(++copy < p.extent(Axis::edp), "a member whose state no rank keeps");
  }
  return {(copy * p.extent(Axis::ep) + static_cast<int>(place / here)) * p.extent(Axis::etp) +
              p.coordinate(Axis::etp),
          member};
}

std::int64_t OffloadedMove::move(const Moved& moved,
                                 std::span<const std::int32_t> before,
                                 std::span<const std::int32_t> after,
                                 Stream& stream) {
  const MeshPosition& p = params_.position();
  const auto holder_of = [&](std::int32_t place) { return holder(moved, place); };
  const std::int64_t all = std::accumulate(moved.bytes.begin(), moved.bytes.end(), std::int64_t{0});
  std::int64_t bytes = 0;
  const auto rounds = rounds_of_swaps(before, after, [&](std::int32_t place) {
    return static_cast<std::size_t>(holder_of(place).rank);
  });
  for (const auto& round : rounds) {
    bool is_idle = true;
    for (const PlaceSwap& swap : round) {
      const Holder a = holder_of(swap.a), b = holder_of(swap.b);
      if (a.rank != b.rank) bytes += 2 * all;
      if (a.rank != stage_.rank() && b.rank != stage_.rank()) continue;
      change_over(moved, a, b, stream);
      is_idle = false;
    }
    if (is_idle) stand_by(moved, stream);
  }
  return bytes * p.extent(Axis::etp) * (moved.by_owners ? 1 : p.extent(Axis::edp));
}

void OffloadedMove::in_pieces(const Moved& moved, const OnPiece& work) const {
  const std::int64_t most = arriving_.numel();
  for (std::size_t t = 0; t < moved.bytes.size(); ++t)
    for (std::int64_t at = 0; at < moved.bytes[t]; at += most)
      work(t, at, std::min(most, moved.bytes[t] - at));
}

// One of them is here, or both.
void OffloadedMove::change_over(const Moved& moved,
                                const Holder& one,
                                const Holder& other,
                                Stream& stream) {
  std::vector<std::int64_t> members;
  for (const Holder& h : {one, other})
    if (h.rank == stage_.rank()) members.push_back(h.member);
  const int peer = one.rank == stage_.rank() ? other.rank : one.rank;
  params_.tiers()->with_members(
      moved.id, members, moved.access, stream, [&](std::span<const MemberTensors> here) {
        const std::vector<TensorView> own = tensors_of(here.front()),
                                      second = tensors_of(here.back());
        MOESAIC_CHECK(own.size() == moved.bytes.size(), "tensors of a member");
        in_pieces(moved, [&](std::size_t t, std::int64_t at, std::int64_t count) {
          MOESAIC_CHECK(own[t].bytes() == static_cast<std::size_t>(moved.bytes[t]),
                        "sections of a record in their order");
          const TensorView mine = bytes_of(own[t], at, count), arriving = arriving_.rows(0, count);
          std::vector<OutgoingMessage> sends;
          std::vector<IncomingMessage> receives;
          if (here.size() == 1) {
            sends.push_back({mine, peer});
            receives.push_back({arriving, peer});
          } else {
            const TensorView its = bytes_of(second[t], at, count);
            copy_tensor(arriving, its, stream);
            copy_tensor(its, mine, stream);
          }
          stage_.exchange(sends, receives, stream);
          copy_tensor(mine, arriving, stream);
        });
      });
}

// Others change over: the same calls, without a message.
void OffloadedMove::stand_by(const Moved& moved, Stream& stream) {
  in_pieces(moved,
            [&](std::size_t, std::int64_t, std::int64_t) { stage_.exchange({}, {}, stream); });
}

}  // namespace moesaic
