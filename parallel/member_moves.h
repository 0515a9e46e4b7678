#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "parallel/placement.h"

namespace moesaic {

/// Tensors that have a slot for each expert of a rank, while experts change places (PlacesOfExperts).
struct MemberMoves {
  std::span<const std::int32_t> before, after;  ///< place of every expert
  int ranks = 1;                                ///< that share the experts
  std::int64_t slot = 0;                        ///< elements of one expert
  /// Elements of the slots of a rank that each of the ranks with the same experts keeps, in their order; one range of
  /// everything where all of them have all of it.
  std::vector<FlatRange> owners = {};
};

/// A rank: which of those that share the experts, and which owner among those with the same experts.
struct MemberHolder {
  int rank = 0, owner = 0;
  bool operator==(const MemberHolder&) const = default;
};

/// Elements that change places; begin counts from the first slot of the holder's rank.
struct MemberPiece {
  MemberHolder from, to;
  std::int64_t from_begin = 0, to_begin = 0, count = 0;
};

/// What elements [window.begin, window.end) of every slot take, between all holders, expert by expert: every rank gets the same list
/// in the same order, and what it sends is what another one receives. Windows are independent of each other.
std::vector<MemberPiece> pieces_to_move(const MemberMoves& moves, const FlatRange& window);

}  // namespace moesaic
