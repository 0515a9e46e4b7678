// Copies of experts inside their node: which there are, and how their tokens are split.
#include "parallel/expert_replicas.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "core/base/error.h"
#include "core/base/random.h"
#include "tests/support/catch.h"

namespace moesaic::test {
namespace {

// Popularity 1 / (rank + 1)^s of the experts in a drawn order.
std::vector<double> zipf(std::int64_t experts, double s, std::uint64_t seed) {
  std::vector<std::pair<double, std::size_t>> order;
  for (std::int64_t e = 0; e < experts; ++e)
    order.emplace_back(uniform(seed, static_cast<std::uint64_t>(e)), static_cast<std::size_t>(e));
  std::sort(order.begin(), order.end());
  std::vector<double> load(order.size());
  for (std::size_t i = 0; i < order.size(); ++i)
    load[order[i].second] = 1 / std::pow(static_cast<double>(i + 1), s);
  return load;
}

PlacesOfExperts shuffled(std::int64_t experts) {
  PlacesOfExperts places = places_in_order(experts);
  for (std::size_t e = 0; e < places.size(); ++e)
    std::swap(places[e], places[(e * 7 + 3) % places.size()]);
  return places;
}

// Every turn of every expert goes home or to a slot that holds a copy of it, in the node of its home; all copies have turns.
void check_copies(const ExpertCopies& c, const PlacesOfExperts& homes, const NodeGrid& grid) {
  REQUIRE(c.place_of_turn.size() == homes.size() * kReplicaTurns);
  REQUIRE(c.expert_of_slot.size() ==
          static_cast<std::size_t>(grid.ranks()) * static_cast<std::size_t>(c.slots));
  std::set<std::int32_t> used;
  for (std::size_t i = 0; i < c.place_of_turn.size(); ++i) {
    const auto e = static_cast<std::int32_t>(i / kReplicaTurns);
    const std::int32_t place = c.place_of_turn[i], number = place % c.places_per_rank(),
                       home = homes[static_cast<std::size_t>(e)];
    const int rank = c.rank_of(place), home_rank = home / c.homes;
    REQUIRE(grid.node_of(rank) == grid.node_of(home_rank));
    if (number < c.homes) {
      REQUIRE(home == rank * c.homes + number);
      continue;
    }
    REQUIRE(rank != home_rank);
    REQUIRE(c.expert_of_slot[static_cast<std::size_t>(rank * c.slots + number - c.homes)] == e);
    used.insert(place);
  }
  CHECK(static_cast<std::int64_t>(used.size()) == c.num_copies());
}

double imbalance(const std::vector<double>& load, const ExpertCopies& copies) {
  return max_over_mean(rank_loads(load, copies));
}

}  // namespace

TEST_CASE("copies of experts: none without need, without room or without a node") {
  const std::vector<double> even(12, 1.0), hot{9, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  const PlacesOfExperts homes = places_in_order(12);
  CHECK(balanced_copies(even, {1, 3}, homes, 2).num_copies() == 0);
  CHECK(balanced_copies(std::vector<double>(12, 0.0), {1, 3}, homes, 2).num_copies() == 0);
  CHECK(balanced_copies(hot, {1, 3}, homes, 0).num_copies() == 0);
  CHECK(balanced_copies(hot, {3, 1}, homes, 2).num_copies() == 0);
  const ExpertCopies none = no_copies(homes, 3, 2);
  check_copies(none, homes, {1, 3});
  CHECK(none.place_of_turn[5 * kReplicaTurns] == 7);  // rank 1, number 1 of 4 + 2 places
  CHECK(rank_loads(hot, none) == rank_loads(hot, homes, 3));
  CHECK_THROWS_AS(balanced_copies(hot, {1, 5}, homes, 1), InternalError);
  CHECK_THROWS_AS(balanced_copies(even, {1, 2}, places_in_order(4), 1), InternalError);
}

TEST_CASE(
    "copies of experts: one hot expert is shared out by its node, the other one has no part") {
  const std::vector<double> load{24, 0, 0, 0, 3, 3, 3, 3};
  const PlacesOfExperts homes = places_in_order(8);
  const ExpertCopies copies = balanced_copies(load, {2, 4}, homes, 1);
  check_copies(copies, homes, {2, 4});
  CHECK(copies.expert_of_slot == std::vector<std::int32_t>{-1, 0, 0, 0, -1, -1, -1, -1});
  CHECK(rank_loads(load, copies) == std::vector<double>{6, 6, 6, 6, 3, 3, 3, 3});
  // Any 4 tokens that follow each other go to all four.
  for (std::size_t t = 0; t + 4 <= kReplicaTurns; ++t) {
    std::set<int> ranks;
    for (std::size_t i = 0; i < 4; ++i)
      ranks.insert(copies.rank_of(copies.place_of_turn[t + i]));
    CHECK(ranks.size() == 4);
  }
}

TEST_CASE("copies of experts on a Zipf router: rank max/mean before and after") {
  for (const NodeGrid grid : {NodeGrid{8, 8}, NodeGrid{1, 8}}) {
    for (const double s : {0.3, 0.5, 0.8, 1.0}) {
      const std::vector<double> load = zipf(896, s, 11);
      const PlacesOfExperts homes = balanced_places(load, grid, shuffled(896));
      double before = max_over_mean(rank_loads(load, homes, grid.ranks()));
      // A node's own excess stays.
      std::vector<double> of_nodes(static_cast<std::size_t>(grid.nodes), 0);
      const auto of_ranks = rank_loads(load, homes, grid.ranks());
      for (std::size_t r = 0; r < of_ranks.size(); ++r)
        of_nodes[static_cast<std::size_t>(grid.node_of(static_cast<int>(r)))] += of_ranks[r];
      const double floor = max_over_mean(of_nodes);
      for (const std::int32_t slots : {1, 2}) {
        const ExpertCopies copies = balanced_copies(load, grid, homes, slots);
        check_copies(copies, homes, grid);
        const double after = imbalance(load, copies);
        INFO(grid.nodes << " x " << grid.per_node << ", s " << s << ", " << slots
                        << " slots: " << before << " -> " << after << ", nodes " << floor);
        CHECK(after <= before + 1e-12);
        CHECK(after < floor * (slots == 1 ? 1.06 : 1.04));
        CHECK(copies.place_of_turn == balanced_copies(load, grid, homes, slots).place_of_turn);
        before = after;
      }
    }
  }
}

TEST_CASE("copies of experts never make the fullest rank fuller, and keep all load in its node") {
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    const NodeGrid grid = seed % 2 == 0 ? NodeGrid{2, 3} : NodeGrid{1, 6};
    const std::vector<double> load = zipf(24, 1.3, seed);
    const PlacesOfExperts homes = shuffled(24);
    const ExpertCopies copies = balanced_copies(load, grid, homes, 2);
    INFO("seed " << seed);
    check_copies(copies, homes, grid);
    const auto before = rank_loads(load, homes, 6), after = rank_loads(load, copies);
    for (int n = 0; n < grid.nodes; ++n) {
      const auto first = static_cast<std::ptrdiff_t>(n * grid.per_node);
      const auto sum = [&](const std::vector<double>& v) {
        return std::accumulate(v.begin() + first, v.begin() + first + grid.per_node, 0.0);
      };
      const auto most = [&](const std::vector<double>& v) {
        return *std::max_element(v.begin() + first, v.begin() + first + grid.per_node);
      };
      CHECK(sum(after) == Approx(sum(before)));
      CHECK(most(after) <= most(before) * (1 + 1e-12));
    }
  }
}

TEST_CASE("tokens of experts with copies are dealt out whole") {
  const std::vector<double> load = zipf(16, 1.0, 3);
  const ExpertCopies copies = balanced_copies(load, {1, 4}, places_in_order(16), 2);
  REQUIRE(copies.num_copies() > 0);
  std::vector<std::int64_t> tokens;
  for (std::int64_t e = 0; e < 16; ++e)
    tokens.push_back(e * 13 % 31);
  const auto of_ranks = rank_tokens(tokens, copies);
  CHECK(std::accumulate(of_ranks.begin(), of_ranks.end(), std::int64_t{0}) ==
        std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0}));
  const std::vector<double> exact =
      rank_loads(std::vector<double>(tokens.begin(), tokens.end()), copies);
  for (std::size_t r = 0; r < 4; ++r)
    CHECK(std::abs(static_cast<double>(of_ranks[r]) - exact[r]) <= 16);
}

TEST_CASE("rounds of copies: all of them, a home once a round, copies of an expert by rank") {
  const std::vector<double> load = zipf(32, 1.5, 4);
  const PlacesOfExperts homes = shuffled(32);
  const ExpertCopies copies = balanced_copies(load, {2, 4}, homes, 2);
  std::int64_t all = 0;
  std::map<std::int32_t, int> last_rank;
  for (const auto& round : rounds_of_copies(copies, homes)) {
    std::set<int> of_home;
    for (const CopyOfExpert& copy : round) {
      ++all;
      CHECK(of_home.insert(copy.home).second);
      CHECK(copies.expert_of_slot[static_cast<std::size_t>(copy.rank * 2 + copy.slot)] ==
            copy.expert);
      CHECK(homes[static_cast<std::size_t>(copy.expert)] == copy.home * 4 + copy.number);
      const auto [it, is_first] = last_rank.emplace(copy.expert, copy.rank);
      CHECK((is_first || it->second < copy.rank));
      it->second = copy.rank;
    }
  }
  CHECK(all == copies.num_copies());
  CHECK(all > 4);
}

}  // namespace moesaic::test
