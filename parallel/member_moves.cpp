#include "parallel/member_moves.h"

#include <algorithm>

#include "core/base/error.h"

namespace moesaic {
namespace {

// The owner of an element, and where what it keeps ends.
struct Kept {
  int owner = 0;
  std::int64_t end = 0;
};
Kept kept_at(const std::vector<FlatRange>& owners, std::int64_t element) {
  for (std::size_t i = 0; i < owners.size(); ++i) {
    if (owners[i].begin <= element && element < owners[i].end)
      return {static_cast<int>(i), owners[i].end};
  }
  MOESAIC_CHECK(false, "an element of an expert that no rank keeps");
  return {};
}

}  // namespace

std::vector<MemberPiece> pieces_to_move(const MemberMoves& moves, const FlatRange& window) {
  MOESAIC_CHECK(moves.before.size() == moves.after.size() &&
                    moves.before.size() % static_cast<std::size_t>(moves.ranks) == 0 &&
                    window.begin >= 0 && window.end <= moves.slot,
                "moves of equally many experts per rank, in a window of their slots");
  const auto here = static_cast<std::int64_t>(moves.before.size()) / moves.ranks;
  std::vector<MemberPiece> pieces;
  for (std::size_t e = 0; e < moves.before.size(); ++e) {
    const std::int64_t old_place = moves.before[e], new_place = moves.after[e];
    if (old_place == new_place) continue;
    const std::int64_t from = old_place % here * moves.slot, to = new_place % here * moves.slot;
    for (std::int64_t at = window.begin; at < window.end;) {
      const Kept source = kept_at(moves.owners, from + at), target = kept_at(moves.owners, to + at);
      const std::int64_t count =
          std::min({window.end - at, source.end - (from + at), target.end - (to + at)});
      pieces.push_back({{static_cast<int>(old_place / here), source.owner},
                        {static_cast<int>(new_place / here), target.owner},
                        from + at,
                        to + at,
                        count});
      at += count;
    }
  }
  return pieces;
}

}  // namespace moesaic
