#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "parallel/expert_placement.h"

namespace moesaic {

/// An expert's tokens take turns among its copies: token t of a rank goes where turn t % kReplicaTurns says. So where a
/// choice goes depends on its token's number and its expert alone, and ranks need not agree on anything.
constexpr std::int32_t kReplicaTurns = 32;

/// Copies of experts beside the ones at home, on ranks of the same node. Every rank has `homes` slots for its own experts
/// and, behind them, `slots` for copies of others': place = rank * (homes + slots) + number there.
struct ExpertCopies {
  int ranks = 1;
  std::int32_t homes = 0, slots = 0;
  std::vector<std::int32_t> expert_of_slot;  ///< [ranks, slots]; -1 = empty
  std::vector<std::int32_t> place_of_turn;   ///< [experts, kReplicaTurns]: a place of the expert

  std::int32_t places_per_rank() const noexcept { return homes + slots; }
  int rank_of(std::int32_t place) const noexcept { return place / places_per_rank(); }
  std::int64_t num_copies() const;  ///< beside the ones at home
};

/// All slots for copies empty; every turn goes home.
ExpertCopies no_copies(const PlacesOfExperts& homes, int ranks, std::int32_t slots);

/// Copies that take from the fullest rank of every node what others of it have room for, in shares of 1 / kReplicaTurns of
/// an expert: again and again the most that one copy can take over, until the fullest rank is within a hundredth of its
/// node's mean, has nothing to give, or slots have run out. Experts of ranks that are not too busy are never copied. A function of
/// the arguments alone, ties by the lower number, so every rank comes to the same copies without asking.
ExpertCopies balanced_copies(std::span<const double> load,
                             const NodeGrid& grid,
                             const PlacesOfExperts& homes,
                             std::int32_t slots);

/// What each rank has to do when expert e has load[e] and its tokens take their turns equally often.
std::vector<double> rank_loads(std::span<const double> load, const ExpertCopies& copies);
/// The same of whole tokens, which are dealt out whole; sums up to all of them.
std::vector<std::int64_t> rank_tokens(std::span<const std::int64_t> tokens,
                                      const ExpertCopies& copies);

/// Where a copy is, and where its expert is at home; numbers count slots (of homes, of copies) on the rank.
struct CopyOfExpert {
  std::int32_t expert = 0;
  int rank = 0;
  std::int32_t slot = 0;
  int home = 0;
  std::int32_t number = 0;
};
/// All copies in rounds: in each of them every home has at most one, and any two ranks meet at most once. The copies of an
/// expert come in the order of their ranks.
std::vector<std::vector<CopyOfExpert>> rounds_of_copies(const ExpertCopies& copies,
                                                        const PlacesOfExperts& homes);

}  // namespace moesaic
