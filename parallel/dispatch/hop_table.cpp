#include "parallel/dispatch/hop_table.h"

#include <algorithm>

namespace moesaic {
namespace {

HopTable empty_table(ExchangeMethod method, const NodeGrid& grid) {
  const auto ranks = static_cast<std::size_t>(grid.ranks());
  HopTable table;
  table.ranks = grid.ranks();
  table.rows.assign(static_cast<std::size_t>(hops_of(method).size),
                    std::vector<std::int64_t>(ranks * ranks, 0));
  table.copies.assign(ranks, 0);
  return table;
}

// Adds the counts of one rank's tokens, path by path.
struct Walk {
  const HopList hops;
  const NodeGrid grid;
  HopTable& table;

  // `counts` are those of hop `hop` and later; `path` numbers the path so far, on which the rows are at `at`.
  void go(const std::int32_t* counts, int hop, std::int64_t path, std::int64_t paths, int at) {
    if (hop >= std::min<int>(hops.size, static_cast<int>(hops.kind.size()))) return;
    const HopKind kind = hops.kind[static_cast<std::size_t>(hop)];
    const std::int32_t groups = num_groups(kind, grid.places(at, 1));
    for (std::int32_t g = 0; g < groups; ++g) {
      const std::int64_t next = path * groups + g;
      const std::int32_t rows = counts[next];
      MOESAIC_CHECK(rows >= 0, "a negative number of rows to exchange");
      if (rows == 0) continue;  // then no longer path has any
      const int to = grid.peer(kind, at, g);
      table.rows[static_cast<std::size_t>(hop)][static_cast<std::size_t>(at * table.ranks + to)] +=
          rows;
      go(counts + paths * groups, hop + 1, next, paths * groups, to);
    }
  }
};

}  // namespace

std::int64_t num_counts(ExchangeMethod method, const NodeGrid& grid) {
  if (is_dense(method)) return 0;
  const HopList hops = hops_of(method);
  return num_path_counts(hops, grid.places(0, 1), hops.size) + grid.ranks();
}

HopTable hop_table(ExchangeMethod method,
                   const NodeGrid& grid,
                   std::span<const std::int32_t> counts) {
  const std::int64_t n = num_counts(method, grid);
  MOESAIC_CHECK(static_cast<std::int64_t>(counts.size()) == n * grid.ranks(),
                "counts of another exchange");
  HopTable table = empty_table(method, grid);
  for (int rank = 0; rank < grid.ranks(); ++rank) {
    const std::int32_t* own = counts.data() + rank * n;
    Walk{hops_of(method), grid, table}.go(own, 0, 0, 1, rank);
    for (int to = 0; to < grid.ranks(); ++to)
      table.copies[static_cast<std::size_t>(to)] += own[n - grid.ranks() + to];
  }
  return table;
}

HopTable dense_hop_table(ExchangeMethod method, const NodeGrid& grid, std::int64_t tokens) {
  HopTable table = empty_table(method, grid);
  const HopList hops = hops_of(method);
  for (int hop = 0; hop < hops.size; ++hop) {
    const HopKind kind = hops.kind[static_cast<std::size_t>(hop)];
    const std::int64_t rows = most_rows(method, grid, tokens, 1, hop);
    for (int from = 0; from < grid.ranks(); ++from) {
      for (std::int32_t g = 0; g < num_groups(kind, grid.places(from, 1)); ++g) {
        const int to = grid.peer(kind, from, g);
        table.rows[static_cast<std::size_t>(hop)]
                  [static_cast<std::size_t>(from * grid.ranks() + to)] = rows;
      }
    }
  }
  return table;
}

std::int64_t most_rows(ExchangeMethod method,
                       const NodeGrid& grid,
                       std::int64_t tokens,
                       std::int64_t choices,
                       int hop) {
  if (hop == 0) return tokens;
  if (hop == hops_of(method).size)
    return grid.ranks() * tokens * (method == ExchangeMethod::pair ? choices : 1);
  if (method == ExchangeMethod::intra_first) return grid.per_node * tokens;
  if (method != ExchangeMethod::intra_first_3) return grid.nodes * tokens;
  // A number of the node gets the tokens of its turn, for each other node in turn, and its own for its own node.
  const std::int64_t turn = (tokens + grid.per_node - 1) / grid.per_node, others = grid.nodes - 1;
  if (hop == 1) return (grid.per_node - 1) * std::min(tokens, others * turn) + tokens;
  return others * grid.per_node * turn + tokens;
}

std::int64_t most_items(ExchangeMethod method,
                        const NodeGrid& grid,
                        std::int64_t tokens,
                        std::int64_t choices,
                        int hop) {
  const std::int64_t groups =
      num_groups(hops_of(method).kind[static_cast<std::size_t>(hop)], grid.places(0, 1));
  const bool all = is_dense(method);
  const std::int64_t per_row = method == ExchangeMethod::pair ? choices
                               : all                          ? groups
                                                              : std::min(choices, groups);
  return most_rows(method, grid, tokens, choices, hop) * per_row;
}

}  // namespace moesaic
