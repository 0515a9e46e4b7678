#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "parallel/dispatch/method.h"

namespace moesaic {

/// Where the experts of a layer are: expert e is at place rank * (experts / ranks) + number there, as in
/// Routing::place_of_expert. Experts keep their numbers in router, statistics and checkpoints wherever they are.
using PlacesOfExperts = std::vector<std::int32_t>;

/// Every expert at the place of its own number.
PlacesOfExperts places_in_order(std::int64_t experts);

/// What each of `ranks` ranks has to do when expert e has load[e]. Throws InternalError for an expert without a place of its
/// own.
std::vector<double> rank_loads(std::span<const double> load,
                               const PlacesOfExperts& places,
                               int ranks);

/// The largest over the mean; 0 when all are 0.
double max_over_mean(std::span<const double> loads);

/// Places that spread `load` evenly over nodes, then over the ranks of each, with equally many experts on every rank: longest
/// processing time first (Graham 1969) under that limit, the heaviest expert to the emptiest bin with room, then exchanges of
/// two experts between the fullest bin and another one for as long as they make the fuller of the two emptier. Nodes, and
/// ranks of a node, are then named so that many experts stay where they are in `current`, and an expert that stays on its
/// rank keeps its place. Where exchanges from `current` come as near, within a hundredth of the fullest rank and node, these
/// are made instead: so few experts move. All stay where the fullest rank would not lose a hundredth, nor the fullest node
/// without a fuller rank. A function of the arguments alone, ties by the lower number, so every rank comes to the same places
/// without asking.
PlacesOfExperts balanced_places(std::span<const double> load,
                                const NodeGrid& grid,
                                const PlacesOfExperts& current);

}  // namespace moesaic
