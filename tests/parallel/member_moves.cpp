#include "parallel/member_moves.h"

#include <numeric>
#include <vector>

#include "tests/support/catch.h"

namespace moesaic::test {
namespace {

// Slots of all holders; an element that nobody keeps is -1.
using Holders = std::vector<std::vector<std::vector<int>>>;  // [rank][owner][element]

Holders filled(const std::vector<std::int32_t>& places,
               const MemberMoves& moves,
               std::int64_t here) {
  Holders all(static_cast<std::size_t>(moves.ranks));
  for (auto& rank : all)
    rank.assign(moves.owners.size(),
                std::vector<int>(static_cast<std::size_t>(here * moves.slot), -1));
  for (std::size_t e = 0; e < places.size(); ++e) {
    const std::int64_t rank = places[e] / here, begin = places[e] % here * moves.slot;
    for (std::size_t o = 0; o < moves.owners.size(); ++o) {
      for (std::int64_t i = 0; i < moves.slot; ++i) {
        if (begin + i < moves.owners[o].begin || begin + i >= moves.owners[o].end) continue;
        all[static_cast<std::size_t>(rank)][o][static_cast<std::size_t>(begin + i)] =
            static_cast<int>(e) * 100 + static_cast<int>(i);
      }
    }
  }
  return all;
}

}  // namespace

TEST_CASE("moves of experts: every element comes from where it was, in any windows") {
  const std::vector<std::int32_t> before{0, 1, 2, 3, 4, 5, 6, 7}, after{5, 1, 0, 3, 4, 2, 7, 6};
  const std::vector<std::vector<FlatRange>> cuts{
      {{0, 20}}, {{0, 10}, {10, 20}}, {{0, 3}, {3, 3}, {3, 17}, {17, 20}}};
  for (const auto& owners : cuts) {
    const MemberMoves moves{
        .before = before, .after = after, .ranks = 2, .slot = 5, .owners = owners};
    for (const std::int64_t step : {1, 2, 5}) {
      INFO(owners.size() << " owners, windows of " << step);
      const Holders from = filled(before, moves, 4);
      Holders to = from;
      for (std::int64_t at = 0; at < moves.slot; at += step) {
        for (const MemberPiece& p : pieces_to_move(moves, {at, std::min(at + step, moves.slot)})) {
          CHECK(p.count > 0);
          for (std::int64_t i = 0; i < p.count; ++i)
            to[static_cast<std::size_t>(p.to.rank)][static_cast<std::size_t>(
                p.to.owner)][static_cast<std::size_t>(p.to_begin + i)] =
                from[static_cast<std::size_t>(p.from.rank)][static_cast<std::size_t>(p.from.owner)]
                    [static_cast<std::size_t>(p.from_begin + i)];
        }
      }
      CHECK(to == filled(after, moves, 4));
    }
  }
}

TEST_CASE("moves of experts: nothing moves without a change") {
  const std::vector<std::int32_t> places{1, 0, 3, 2};
  CHECK(pieces_to_move(
            {.before = places, .after = places, .ranks = 2, .slot = 7, .owners = {{0, 14}}}, {0, 7})
            .empty());
}

}  // namespace moesaic::test
