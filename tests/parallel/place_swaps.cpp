#include "parallel/place_swaps.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include "core/base/random.h"
#include "tests/support/catch.h"

namespace moesaic::test {
namespace {

using Places = std::vector<std::int32_t>;

Places shuffled(std::size_t n, std::uint64_t key) {
  Places places(n);
  std::iota(places.begin(), places.end(), 0);
  for (std::size_t i = n; i > 1; --i) {
    const auto j = static_cast<std::size_t>(uniform(key, i) * static_cast<double>(i));
    std::swap(places[i - 1], places[std::min(j, i - 1)]);
  }
  return places;
}

std::size_t cycles_of(const Places& before, const Places& after) {
  Places next(before.size());
  for (std::size_t e = 0; e < before.size(); ++e)
    next[static_cast<std::size_t>(before[e])] = after[e];
  std::set<std::int32_t> seen;
  std::size_t n = 0;
  for (std::int32_t first = 0; first < static_cast<std::int32_t>(next.size()); ++first) {
    n += seen.count(first) == 0 ? 1 : 0;
    for (std::int32_t p = first; seen.insert(p).second;)
      p = next[static_cast<std::size_t>(p)];
  }
  return n;
}

}  // namespace

TEST_CASE(
    "swaps of places: every expert comes to its new place, and nobody has two swaps at once") {
  for (const std::size_t here : {1, 2, 3, 8}) {
    for (std::uint64_t key = 0; key < 20; ++key) {
      const std::size_t n = here * 6;
      const Places before = shuffled(n, key), after = shuffled(n, key + 100);
      const auto holder = [&](std::int32_t p) { return static_cast<std::size_t>(p) / here; };
      Places expert_at(n);
      for (std::size_t e = 0; e < n; ++e)
        expert_at[static_cast<std::size_t>(before[e])] = static_cast<std::int32_t>(e);
      std::size_t swaps = 0;
      for (const auto& round : rounds_of_swaps(before, after, holder)) {
        CHECK(!round.empty());
        std::set<std::size_t> busy;
        for (const PlaceSwap& s : round) {
          CHECK(busy.insert(holder(s.a)).second);
          CHECK((holder(s.a) == holder(s.b) || busy.insert(holder(s.b)).second));
          std::swap(expert_at[static_cast<std::size_t>(s.a)],
                    expert_at[static_cast<std::size_t>(s.b)]);
          ++swaps;
        }
      }
      for (std::size_t e = 0; e < n; ++e)
        CHECK(expert_at[static_cast<std::size_t>(after[e])] == static_cast<std::int32_t>(e));
      CHECK(swaps == n - cycles_of(before, after));
    }
  }
}

TEST_CASE("swaps of places: none without a change") {
  const Places places{1, 0, 3, 2};
  CHECK(rounds_of_swaps(places, places, [](std::int32_t) { return std::size_t{0}; }).empty());
}

TEST_CASE("swaps of places: pairs of different holders change over in one round") {
  const Places before{0, 1, 2, 3, 4, 5, 6, 7}, after{2, 1, 0, 3, 6, 5, 4, 7};
  const auto rounds = rounds_of_swaps(
      before, after, [](std::int32_t p) { return static_cast<std::size_t>(p) / 2; });
  REQUIRE(rounds.size() == 1);
  CHECK(rounds[0] == std::vector<PlaceSwap>{{0, 2}, {4, 6}});
}

}  // namespace moesaic::test
