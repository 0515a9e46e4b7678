#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace moesaic {

/// Two places whose experts change over.
struct PlaceSwap {
  std::int32_t a = 0, b = 0;
  bool operator==(const PlaceSwap&) const = default;
};

/// A change of places (PlacesOfExperts) as swaps, for whoever has room for few experts beside those in place: round after round
/// they bring what is at before[e] to after[e]. In a round no two swaps concern the same holder, so that all of them may go on
/// at once. `holder` says who has a place: any numbers from 0 on. A cycle of n places takes n - 1 swaps, as a product of two
/// reflections, so that at most twice as much is carried as without swaps. A function of the arguments alone.
std::vector<std::vector<PlaceSwap>> rounds_of_swaps(
    std::span<const std::int32_t> before,
    std::span<const std::int32_t> after,
    const std::function<std::size_t(std::int32_t place)>& holder);

}  // namespace moesaic
