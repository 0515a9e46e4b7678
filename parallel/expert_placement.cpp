#include "parallel/expert_placement.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include <fmt/format.h>

#include "core/base/error.h"

namespace moesaic {
namespace {

using Experts = std::vector<std::int32_t>;
constexpr double kLeastGain = 0.01;
// Exchanges that spare the others a move end here, above the mean: what is left would not pay for a move.
constexpr double kNearMean = kLeastGain / 10;

std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

double sum_of(std::span<const double> load, const Experts& experts) {
  double sum = 0;
  for (const std::int32_t e : experts)
    sum += load[at(e)];
  return sum;
}

// The exchange of one expert of each bin that leaves the fuller of them with least; false when none helps.
bool exchange_best(std::span<const double> load, Experts& full, Experts& other) {
  const double gap = sum_of(load, full) - sum_of(load, other);
  double best = 0;
  std::size_t from = 0, to = 0;
  for (std::size_t i = 0; i < full.size(); ++i) {
    for (std::size_t j = 0; j < other.size(); ++j) {
      // What moves over must be less than the gap, best half of it.
      const double moved = load[at(full[i])] - load[at(other[j])];
      const double gain = std::min(moved, gap - moved);
      if (gain > best) {
        best = gain;
        from = i;
        to = j;
      }
    }
  }
  if (best <= 1e-9 * gap) return false;
  std::swap(full[from], other[to]);
  return true;
}

// Exchanges two experts of the fullest bin and another one until the fullest is not `near` above the mean, or no exchange
// helps. Ends: each makes the fullest bin emptier and none as full. The limit is for time alone.
void even_out(std::span<const double> load, std::vector<Experts>& bins, double near) {
  const std::size_t most = 4 * bins.size() * bins[0].size();
  std::vector<double> sums(bins.size());
  for (std::size_t turn = 0; turn < most; ++turn) {
    for (std::size_t b = 0; b < bins.size(); ++b)
      sums[b] = sum_of(load, bins[b]);
    if (max_over_mean(sums) <= 1 + near) return;
    std::vector<std::size_t> order(bins.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return sums[a] < sums[b];
    });
    const std::size_t full = order.back();
    const bool moved = std::any_of(order.begin(), order.end() - 1, [&](std::size_t b) {
      return exchange_best(load, bins[full], bins[b]);
    });
    if (!moved) return;
  }
}

// `experts` in equal parts of about equal load.
std::vector<Experts> deal(std::span<const double> load, Experts experts, int parts) {
  const std::size_t room = experts.size() / at(parts);
  std::stable_sort(experts.begin(), experts.end(), [&](std::int32_t a, std::int32_t b) {
    return load[at(a)] != load[at(b)] ? load[at(a)] > load[at(b)] : a < b;
  });
  std::vector<Experts> bins(at(parts));
  std::vector<double> sums(at(parts), 0);
  for (const std::int32_t e : experts) {
    std::size_t emptiest = bins.size();
    for (std::size_t b = 0; b < bins.size(); ++b) {
      if (bins[b].size() < room && (emptiest == bins.size() || sums[b] < sums[emptiest]))
        emptiest = b;
    }
    bins[emptiest].push_back(e);
    sums[emptiest] += load[at(e)];
  }
  even_out(load, bins, 0);
  return bins;
}

// The bins in an order in which many experts stay where they are: bin_of(place) says which bin a place is in. The pair
// of a bin and a name that keeps most goes first.
template <class BinOf>
std::vector<Experts> named(std::vector<Experts> bins,
                           const PlacesOfExperts& current,
                           const BinOf& bin_of) {
  const std::size_t n = bins.size();
  struct Pair {
    double kept;
    std::size_t bin, name;
  };
  std::vector<Pair> pairs;
  for (std::size_t b = 0; b < n; ++b) {
    std::vector<double> kept(n, 0);
    for (const std::int32_t e : bins[b]) {
      const std::int64_t name = bin_of(current[at(e)]);
      if (name >= 0 && name < static_cast<std::int64_t>(n)) kept[at(name)] += 1;
    }
    for (std::size_t name = 0; name < n; ++name)
      pairs.push_back({kept[name], b, name});
  }
  std::stable_sort(
      pairs.begin(), pairs.end(), [](const Pair& a, const Pair& b) { return a.kept > b.kept; });
  std::vector<Experts> result(n);
  std::vector<char> bin_used(n, 0), name_used(n, 0);
  for (const Pair& p : pairs) {
    if (bin_used[p.bin] != 0 || name_used[p.name] != 0) continue;
    bin_used[p.bin] = name_used[p.name] = 1;
    result[p.name] = std::move(bins[p.bin]);
  }
  return result;
}

// Experts that stay on a rank keep their places, the others fill what is left in order.
void place_on_rank(Experts experts,
                   std::int64_t first,
                   std::int64_t room,
                   const PlacesOfExperts& current,
                   PlacesOfExperts& places) {
  std::sort(experts.begin(), experts.end());
  std::vector<char> taken(at(room), 0);
  Experts arriving;
  for (const std::int32_t e : experts) {
    const std::int64_t number = current[at(e)] - first;
    if (number >= 0 && number < room) {
      places[at(e)] = current[at(e)];
      taken[at(number)] = 1;
    } else {
      arriving.push_back(e);
    }
  }
  std::int64_t next = 0;
  for (const std::int32_t e : arriving) {
    while (taken[at(next)] != 0)
      ++next;
    places[at(e)] = static_cast<std::int32_t>(first + next++);
  }
}

void check_places(const PlacesOfExperts& places, std::size_t experts, int ranks) {
  MOESAIC_CHECK(
      ranks > 0 && experts % at(ranks) == 0 && places.size() == experts,
      fmt::format("{} experts with {} places on {} ranks", experts, places.size(), ranks));
  std::vector<char> taken(experts, 0);
  for (const std::int32_t place : places) {
    MOESAIC_CHECK(place >= 0 && at(place) < experts && taken[at(place)] == 0,
                  fmt::format("place {} of {} is wrong or taken twice", place, experts));
    taken[at(place)] = 1;
  }
}

}  // namespace

PlacesOfExperts places_in_order(std::int64_t experts) {
  PlacesOfExperts places(at(experts));
  std::iota(places.begin(), places.end(), 0);
  return places;
}

std::vector<double> rank_loads(std::span<const double> load,
                               const PlacesOfExperts& places,
                               int ranks) {
  check_places(places, load.size(), ranks);
  const std::size_t each = load.size() / at(ranks);
  std::vector<double> loads(at(ranks), 0);
  for (std::size_t e = 0; e < load.size(); ++e)
    loads[at(places[e]) / each] += load[e];
  return loads;
}

double max_over_mean(std::span<const double> loads) {
  const double sum = std::accumulate(loads.begin(), loads.end(), 0.0);
  return sum > 0 ? *std::max_element(loads.begin(), loads.end()) *
                       static_cast<double>(loads.size()) / sum
                 : 0;
}

namespace {

// Every expert anew, the heaviest first.
PlacesOfExperts dealt_places(std::span<const double> load,
                             const NodeGrid& grid,
                             const PlacesOfExperts& current) {
  const int nodes = grid.nodes, ranks = grid.per_node;
  const auto each = static_cast<std::int64_t>(load.size()) / (nodes * ranks);
  PlacesOfExperts places(load.size());
  const auto of_nodes =
      named(deal(load, places_in_order(static_cast<std::int64_t>(load.size())), nodes),
            current,
            [&](std::int64_t place) { return place / (each * ranks); });
  for (int n = 0; n < nodes; ++n) {
    const std::int64_t first_rank = std::int64_t{n} * ranks;
    const auto of_ranks = named(deal(load, of_nodes[at(n)], ranks),
                                current,
                                [&](std::int64_t place) { return place / each - first_rank; });
    for (int r = 0; r < ranks; ++r)
      place_on_rank(of_ranks[at(r)], (first_rank + r) * each, each, current, places);
  }
  return places;
}

// As they are, but for exchanges of two: first between nodes, then between the ranks of each.
PlacesOfExperts exchanged_places(std::span<const double> load,
                                 const NodeGrid& grid,
                                 const PlacesOfExperts& current) {
  Experts at_place(load.size());
  for (std::size_t e = 0; e < load.size(); ++e)
    at_place[at(current[e])] = static_cast<std::int32_t>(e);
  const auto exchange = [&](std::size_t first, std::size_t count, int parts) {
    const std::size_t room = count / at(parts);
    std::vector<Experts> bins;
    for (std::size_t b = 0; b < at(parts); ++b) {
      const auto begin = at_place.begin() + static_cast<std::ptrdiff_t>(first + b * room);
      bins.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(room));
    }
    even_out(load, bins, kNearMean);
    for (std::size_t b = 0; b < at(parts); ++b)
      std::copy(bins[b].begin(),
                bins[b].end(),
                at_place.begin() + static_cast<std::ptrdiff_t>(first + b * room));
  };
  exchange(0, load.size(), grid.nodes);
  const std::size_t of_node = load.size() / at(grid.nodes);
  for (std::size_t n = 0; n < at(grid.nodes); ++n)
    exchange(n * of_node, of_node, grid.per_node);
  PlacesOfExperts places(load.size());
  for (std::size_t p = 0; p < at_place.size(); ++p)
    places[at(at_place[p])] = static_cast<std::int32_t>(p);
  return places;
}

}  // namespace

PlacesOfExperts balanced_places(std::span<const double> load,
                                const NodeGrid& grid,
                                const PlacesOfExperts& current) {
  const int nodes = grid.nodes, ranks = grid.ranks();
  check_places(current, load.size(), ranks);
  // The fullest one's load.
  const auto fullest = [&](const PlacesOfExperts& places, int parts) {
    return max_over_mean(rank_loads(load, places, parts));
  };
  const double least = 1 - kLeastGain;
  PlacesOfExperts places = dealt_places(load, grid, current);
  if (PlacesOfExperts few = exchanged_places(load, grid, current);
      fullest(few, ranks) * least <= fullest(places, ranks) &&
      fullest(few, nodes) * least <= fullest(places, nodes))
    places = std::move(few);
  const double rank = fullest(places, ranks) / fullest(current, ranks),
               node = fullest(places, nodes) / fullest(current, nodes);
  const bool pays = rank < least || (node < least && rank <= 1);
  return pays ? places : current;
}

}  // namespace moesaic
