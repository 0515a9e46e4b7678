#include "parallel/dispatch/routed_plan.h"

#include <algorithm>
#include <map>
#include <utility>

#include "parallel/dispatch/hop_table.h"

namespace moesaic {
namespace {

// The ranks that the choice `place` of a token passes, one per hop; the last one owns the place.
std::vector<int> way_of(
    ExchangeMethod method, const NodeGrid& grid, int source, std::int64_t token, int owner) {
  const int l = grid.per_node, own_node = source / l, own_number = source % l, node = owner / l;
  switch (method) {
    case ExchangeMethod::pair:
    case ExchangeMethod::flat:
    case ExchangeMethod::dense:
      return {owner};
    case ExchangeMethod::inter_first:
    case ExchangeMethod::hdense:
      return {node * l + own_number, owner};
    case ExchangeMethod::intra_first:
      return {own_node * l + owner % l, owner};
    case ExchangeMethod::intra_first_3:
      break;
  }
  const int proxy = node == own_node ? own_number : static_cast<int>((token + node) % l);
  return {own_node * l + proxy, node * l + proxy, owner};
}

// The rows that `row` becomes in a hop, by destination.
std::multimap<int, RoutedRow> copies_of(ExchangeMethod method,
                                        const NodeGrid& grid,
                                        std::int32_t places_per_rank,
                                        std::size_t hop,
                                        int at,
                                        const RoutedRow& row) {
  std::multimap<int, RoutedRow> copies;
  const RoutedRow nothing{row.source, row.token, std::vector<std::int32_t>(row.places.size(), -1)};
  if (is_dense(method)) {  // to everyone whom the hop reaches, wanted or not
    for (int to = 0; to < grid.ranks(); ++to) {
      const bool along_rail = grid.number_of(to) == grid.number_of(at),
                 in_node = grid.node_of(to) == grid.node_of(at);
      if (method == ExchangeMethod::dense || (hop == 0 ? along_rail : in_node))
        copies.emplace(to, nothing);
    }
  }
  for (std::size_t j = 0; j < row.places.size(); ++j) {
    if (row.places[j] < 0) continue;
    const int to =
        way_of(method, grid, row.source, row.token, row.places[j] / places_per_rank)[hop];
    auto copy = copies.find(to);
    if (copy == copies.end() || method == ExchangeMethod::pair) copy = copies.emplace(to, nothing);
    copy->second.places[j] = row.places[j];
  }
  return copies;
}

// Which part of the rows of rank `at`, fanned out by `from`, has this one (HopTable::lots).
int part_of(ExchangeMethod method,
            const NodeGrid& grid,
            const RoutedRow& row,
            std::int64_t tokens,
            int from,
            int at) {
  const int away = (grid.node_of(row.source) - grid.node_of(at) + grid.nodes) % grid.nodes,
            lots = slow_lots(method, grid);
  if (away == 0) return 0;
  int run = 0;
  while (run_begin(method, grid, tokens, run + 1) <= row.token)
    ++run;
  const int crossing = grid.node_of(row.source) * grid.per_node + grid.number_of(from);
  return 1 + (away - 1) * lots + lot_of(method, grid, row.source, run, crossing);
}

}  // namespace

Traffic RoutedPlan::sent_by(int rank, const NodeGrid& grid, std::int64_t row_bytes) const {
  Traffic sum;
  for (const auto& hop : hops) {
    const auto& rows = hop[static_cast<std::size_t>(rank)].send_rows;
    for (int to = 0; to < grid.ranks(); ++to)
      sum.add(grid.link(rank, to), rows[static_cast<std::size_t>(to)], row_bytes);
  }
  return sum;
}

RoutedPlan route_tokens(ExchangeMethod method,
                        const NodeGrid& grid,
                        std::int32_t places_per_rank,
                        std::span<const TokenChoices> ranks) {
  const auto num_ranks = static_cast<std::size_t>(grid.ranks());
  MOESAIC_CHECK(ranks.size() == num_ranks, "choices of another number of ranks");
  std::vector<std::vector<RoutedRow>> rows(num_ranks);
  for (std::size_t r = 0; r < num_ranks; ++r) {
    for (std::int64_t t = 0; t < ranks[r].tokens(); ++t) {
      const auto first = ranks[r].places.begin() + t * ranks[r].choices;
      rows[r].push_back({static_cast<int>(r), t, {first, first + ranks[r].choices}});
    }
  }
  RoutedPlan plan;
  for (std::size_t hop = 0; hop < static_cast<std::size_t>(hops_of(method).size); ++hop) {
    std::vector<RoutedHop> now(num_ranks);
    std::vector<std::vector<std::vector<RoutedRow>>> arriving(
        num_ranks, std::vector<std::vector<RoutedRow>>(num_ranks));  // [to][from]
    for (std::size_t from = 0; from < num_ranks; ++from) {
      // By destination, and for each in the order of the rows.
      std::vector<std::vector<std::int32_t>> lists(num_ranks);
      for (std::size_t i = 0; i < rows[from].size(); ++i) {
        for (auto& [to, row] :
             copies_of(method, grid, places_per_rank, hop, static_cast<int>(from), rows[from][i])) {
          lists[static_cast<std::size_t>(to)].push_back(static_cast<std::int32_t>(i));
          arriving[static_cast<std::size_t>(to)][from].push_back(row);
        }
      }
      for (const auto& list : lists) {
        now[from].send_rows.push_back(static_cast<std::int64_t>(list.size()));
        now[from].src.insert(now[from].src.end(), list.begin(), list.end());
      }
    }
    for (std::size_t r = 0; r < num_ranks; ++r) {
      std::vector<std::pair<int, RoutedRow>> came;  // with their parts
      const bool fanned =
          fans_out(method) && hop + 1 == static_cast<std::size_t>(hops_of(method).size);
      for (std::size_t i = 0; i < num_ranks; ++i) {
        const std::size_t from = (r + i) % num_ranks;
        for (const RoutedRow& row : arriving[r][from]) {
          const std::int64_t tokens = ranks[static_cast<std::size_t>(row.source)].tokens();
          came.emplace_back(
              fanned
                  ? part_of(method, grid, row, tokens, static_cast<int>(from), static_cast<int>(r))
                  : 0,
              row);
        }
      }
      std::stable_sort(
          came.begin(), came.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
      for (auto& one : came)
        now[r].received.push_back(std::move(one.second));
      rows[r] = now[r].received;
    }
    plan.hops.push_back(std::move(now));
  }
  return plan;
}

}  // namespace moesaic
