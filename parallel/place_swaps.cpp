#include "parallel/place_swaps.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"

namespace moesaic {
namespace {

// Places in the order in which an expert would go through them: the one at [i] goes to [i + 1], the last one to the first.
std::vector<std::vector<std::int32_t>> cycles(std::span<const std::int32_t> before,
                                              std::span<const std::int32_t> after) {
  std::vector<std::int32_t> next(before.size(), -1);
  for (std::size_t e = 0; e < before.size(); ++e)
    next.at(static_cast<std::size_t>(before[e])) = after[e];
  std::vector<char> seen(before.size(), 0);
  std::vector<std::vector<std::int32_t>> all;
  for (std::size_t first = 0; first < next.size(); ++first) {
    std::vector<std::int32_t> cycle;
    for (auto place = static_cast<std::int32_t>(first);
         seen.at(static_cast<std::size_t>(place)) == 0;
         place = next[static_cast<std::size_t>(place)]) {
      MOESAIC_CHECK(next[static_cast<std::size_t>(place)] >= 0, "every place has an expert");
      seen[static_cast<std::size_t>(place)] = 1;
      cycle.push_back(place);
    }
    if (cycle.size() > 1) all.push_back(std::move(cycle));
  }
  return all;
}

}  // namespace

// With places numbered along their cycle of n: i -> -i, then j -> 1 - j, which is i -> i + 1 (mod n).
std::vector<std::vector<PlaceSwap>> rounds_of_swaps(
    std::span<const std::int32_t> before,
    std::span<const std::int32_t> after,
    const std::function<std::size_t(std::int32_t place)>& holder) {
  MOESAIC_CHECK(before.size() == after.size(), "as many places before as after");
  const auto all = cycles(before, after);
  std::vector<std::vector<PlaceSwap>> rounds;
  for (const std::size_t turn : {std::size_t{0}, std::size_t{1}}) {
    std::vector<std::size_t> free_from;  // by holder: the first round that it has no swap in
    const std::size_t first_round = rounds.size();
    for (const auto& cycle : all) {
      const std::size_t n = cycle.size();
      for (std::size_t i = 0; i < n; ++i) {
        const std::size_t j = (n + turn - i) % n;
        if (i >= j) continue;
        const PlaceSwap swap{cycle[i], cycle[j]};
        const std::size_t one = holder(swap.a), other = holder(swap.b);
        if (std::max(one, other) >= free_from.size())
          free_from.resize(std::max(one, other) + 1, first_round);
        const std::size_t round = std::max(free_from[one], free_from[other]);
        free_from[one] = free_from[other] = round + 1;
        if (round >= rounds.size()) rounds.resize(round + 1);
        rounds[round].push_back(swap);
      }
    }
  }
  return rounds;
}

}  // namespace moesaic
