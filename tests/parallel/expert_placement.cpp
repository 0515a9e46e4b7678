#include "parallel/expert_placement.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "core/base/error.h"
#include "core/base/random.h"
#include "tests/support/catch.h"

namespace moesaic::test {
namespace {

// Popularity 1 / (rank + 1)^s of the experts in a drawn order.
std::vector<double> zipf(std::int64_t experts, double s, std::uint64_t seed) {
  std::vector<std::pair<double, std::int64_t>> order;
  for (std::int64_t e = 0; e < experts; ++e)
    order.emplace_back(uniform(seed, static_cast<std::uint64_t>(e)), e);
  std::sort(order.begin(), order.end());
  std::vector<double> load(static_cast<std::size_t>(experts));
  for (std::size_t i = 0; i < order.size(); ++i)
    load[static_cast<std::size_t>(order[i].second)] = 1 / std::pow(static_cast<double>(i + 1), s);
  return load;
}

double imbalance(const std::vector<double>& load, const PlacesOfExperts& places, int ranks) {
  return max_over_mean(rank_loads(load, places, ranks));
}

bool is_permutation(const PlacesOfExperts& places) {
  return std::set<std::int32_t>(places.begin(), places.end()).size() == places.size() &&
         *std::max_element(places.begin(), places.end()) + 1 ==
             static_cast<std::int32_t>(places.size());
}

}  // namespace

TEST_CASE("loads of ranks") {
  const std::vector<double> load{4, 0, 1, 1, 2, 0};
  CHECK(rank_loads(load, places_in_order(6), 3) == std::vector<double>{4, 2, 2});
  CHECK(max_over_mean(rank_loads(load, places_in_order(6), 3)) == 1.5);
  // Expert 0 and expert 5 change places.
  CHECK(rank_loads(load, {5, 1, 2, 3, 4, 0}, 3) == std::vector<double>{0, 2, 6});
  CHECK(max_over_mean(std::vector<double>{0, 0}) == 0);
  CHECK_THROWS_AS(rank_loads(load, {0, 0, 2, 3, 4, 5}, 3), InternalError);
  CHECK_THROWS_AS(rank_loads(load, places_in_order(6), 4), InternalError);
}

TEST_CASE("balanced places: the best that equal numbers of experts allow, where that is known") {
  const std::vector<double> load{8, 7, 5, 4, 2, 1};
  const PlacesOfExperts places = balanced_places(load, {1, 3}, places_in_order(6));
  REQUIRE(is_permutation(places));
  CHECK(rank_loads(load, places, 3) == std::vector<double>{9, 9, 9});
  // The heaviest to the emptiest would end at 3 + 2 + 2 | 3 + 2 + 0.
  const std::vector<double> exchanged{3, 3, 2, 2, 2, 0};
  CHECK(rank_loads(exchanged, balanced_places(exchanged, {1, 2}, places_in_order(6)), 2) ==
        std::vector<double>{6, 6});
  // One expert is more than a fair share: nothing can be done but giving it the lightest company.
  const std::vector<double> hot{100, 1, 2, 3};
  const PlacesOfExperts forced = balanced_places(hot, {1, 2}, places_in_order(4));
  CHECK(max_over_mean(rank_loads(hot, forced, 2)) == Approx(101 / 53.0));
}

TEST_CASE(
    "balanced places move nothing that is balanced, and as little as the names of ranks allow") {
  const std::vector<double> even(12, 1.0);
  CHECK(balanced_places(even, {1, 3}, places_in_order(12)) == places_in_order(12));
  CHECK(balanced_places(even, {2, 3}, places_in_order(12)) == places_in_order(12));
  // The heaviest experts lie apart already; experts of one rank may also lie in another order.
  const std::vector<double> load{4, 1, 3, 2};
  const PlacesOfExperts current{3, 2, 0, 1};
  CHECK(balanced_places(load, {1, 2}, current) == current);
  const std::vector<double> zipf_load = zipf(64, 0.7, 3);
  const PlacesOfExperts once = balanced_places(zipf_load, {2, 4}, places_in_order(64));
  CHECK(balanced_places(zipf_load, {2, 4}, once) == once);
}

TEST_CASE("a Zipf router: rank max/mean before and after, over ranks and over nodes") {
  for (const double s : {0.3, 0.5, 0.8}) {
    const std::vector<double> load = zipf(896, s, 11);
    const PlacesOfExperts in_order = places_in_order(896);
    const PlacesOfExperts over_ranks = balanced_places(load, {1, 64}, in_order),
                          over_nodes = balanced_places(load, {8, 8}, in_order);
    REQUIRE(is_permutation(over_ranks));
    REQUIRE(is_permutation(over_nodes));
    const double before = imbalance(load, in_order, 64), after = imbalance(load, over_ranks, 64);
    // No placement can do better than the hottest expert, and 13 others of the coldest, allow.
    std::vector<double> sorted = load;
    std::sort(sorted.begin(), sorted.end());
    double least = sorted.back();
    for (std::size_t i = 0; i < 13; ++i)
      least += sorted[i];
    const double bound = std::max(1.0, least * 64 / std::accumulate(load.begin(), load.end(), 0.0));
    INFO("s " << s << " before " << before << " after " << after << " bound " << bound);
    CHECK(after < 1.02 * bound);
    CHECK(after < before);
    CHECK(imbalance(load, over_nodes, 8) < 1.01);  // nodes of 8 ranks as bins of 112 experts
    CHECK(imbalance(load, over_nodes, 64) < before);
  }
}

TEST_CASE("balanced places never make the fullest rank fuller, whatever nodes gain") {
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    const std::vector<double> load = zipf(16, 0.4, seed);
    PlacesOfExperts places = places_in_order(16);
    for (int again = 0; again < 3; ++again) {
      const PlacesOfExperts after = balanced_places(load, {2, 2}, places);
      INFO("seed " << seed << ", " << again);
      CHECK(imbalance(load, after, 4) <= imbalance(load, places, 4));
      places = after;
    }
  }
}

TEST_CASE("balanced places: few experts move where exchanges of two do as well as dealing anew") {
  // 128 experts of about equal load on two ranks, as a router that balances well leaves them.
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    std::vector<double> load;
    for (std::uint64_t e = 0; e < 128; ++e)
      load.push_back(1 + uniform(seed, e) + (e < 64 ? 0.08 : 0));
    const PlacesOfExperts before = places_in_order(128),
                          after = balanced_places(load, {1, 2}, before);
    int moved = 0;
    for (std::size_t e = 0; e < 128; ++e)
      moved += after[e] != before[e] ? 1 : 0;
    INFO("seed " << seed << ": " << imbalance(load, before, 2) << " to "
                 << imbalance(load, after, 2) << ", " << moved);
    CHECK(imbalance(load, after, 2) < 1.0112);
    CHECK(moved <= 12);
  }
}

TEST_CASE("balanced places are the same whoever asks") {
  const std::vector<double> load = zipf(128, 1.0, 5);
  CHECK(balanced_places(load, {2, 4}, places_in_order(128)) ==
        balanced_places(load, {2, 4}, places_in_order(128)));
  // Equal loads everywhere: ties go by number.
  CHECK(is_permutation(balanced_places(std::vector<double>(16, 0.0), {2, 4}, places_in_order(16))));
}

}  // namespace moesaic::test
