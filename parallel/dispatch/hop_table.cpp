#include "parallel/dispatch/hop_table.h"

#include <algorithm>

namespace moesaic {
namespace {

constexpr int kLotsOfOthers = 8;

HopTable empty_table(ExchangeMethod method, const NodeGrid& grid) {
  const auto ranks = static_cast<std::size_t>(grid.ranks());
  HopTable table;
  table.ranks = grid.ranks();
  table.rows.assign(static_cast<std::size_t>(hops_of(method).size),
                    std::vector<std::int64_t>(ranks * ranks, 0));
  table.copies.assign(ranks, 0);
  if (!fans_out(method)) return table;
  table.nodes = grid.nodes;
  table.lots = slow_lots(method, grid);
  const auto lots = static_cast<std::size_t>(table.lots);
  table.crossed.assign(ranks * lots * static_cast<std::size_t>(grid.nodes), 0);
  table.fanned.assign(ranks * lots * ranks, 0);
  return table;
}

// Adds the counts of one run of a rank's tokens, path by path.
struct Walk {
  const ExchangeMethod method;
  const HopList hops;
  const NodeGrid grid;
  HopTable& table;
  const int source, run;

  struct Way {
    int at = 0;        // where the rows are
    int crossing = 0;  // from which rank they crossed to another node
    int lot = 0;
  };

  // `counts` are those of hop `hop` and later; `path` numbers the path so far.
  void go(const std::int32_t* counts, int hop, std::int64_t path, std::int64_t paths, Way way) {
    if (hop >= std::min<int>(hops.size, static_cast<int>(hops.kind.size()))) return;
    const HopKind kind = hops.kind[static_cast<std::size_t>(hop)];
    if (fans_out(method) && kind == HopKind::node) {
      way.crossing = way.at;
      way.lot = lot_of(method, grid, source, run, way.at);
    }
    const std::int32_t groups = num_groups(kind, grid.places(way.at, 1));
    for (std::int32_t g = 0; g < groups; ++g) {
      const std::int64_t next = path * groups + g;
      const std::int32_t rows = counts[next];
      MOESAIC_CHECK(rows >= 0, "a negative number of rows to exchange");
      if (rows == 0) continue;  // then no longer path has any
      const int to = grid.peer(kind, way.at, g);
      table.rows[static_cast<std::size_t>(hop)]
                [static_cast<std::size_t>(way.at * table.ranks + to)] += rows;
      if (fans_out(method) && kind == HopKind::node)
        table.crossed_at(way.at, grid.node_of(to), way.lot) += rows;
      if (fans_out(method) && hop + 1 == hops.size)
        table.fanned_at(way.crossing, way.lot, to) += rows;
      go(counts + paths * groups, hop + 1, next, paths * groups, {to, way.crossing, way.lot});
    }
  }
};

}  // namespace

int token_runs(ExchangeMethod method, const NodeGrid& grid) noexcept {
  if (!fans_out(method) || grid.nodes == 1) return 1;
  const int others = grid.nodes - 1, lots = (kLotsOfOthers + others - 1) / others;
  // Of every rank that they may come from.
  return method == ExchangeMethod::intra_first_3 ? (lots + grid.per_node - 1) / grid.per_node
                                                 : lots;
}

int slow_lots(ExchangeMethod method, const NodeGrid& grid) noexcept {
  const int runs = token_runs(method, grid);
  if (method != ExchangeMethod::intra_first_3 || grid.nodes == 1) return runs;
  const int others = grid.nodes - 1, lots = (kLotsOfOthers + others - 1) / others;
  return runs > 1 ? runs * grid.per_node : std::min(lots, grid.per_node);
}

std::int64_t run_begin(ExchangeMethod method,
                       const NodeGrid& grid,
                       std::int64_t tokens,
                       int run) noexcept {
  const int runs = token_runs(method, grid);
  if (run == runs) return tokens;
  // Whose turn a token is must not depend on where its run begins (HopKind::proxy).
  const std::int64_t step = method == ExchangeMethod::intra_first_3 ? grid.per_node : 1;
  return tokens * run / runs / step * step;
}

int lot_of(ExchangeMethod method, const NodeGrid& grid, int source, int run, int from) noexcept {
  if (method != ExchangeMethod::intra_first_3) return run;
  const int turn = (grid.number_of(source) - grid.number_of(from) + grid.per_node) % grid.per_node;
  return turn * slow_lots(method, grid) / grid.per_node + run;
}

std::int64_t num_counts(ExchangeMethod method, const NodeGrid& grid) {
  if (is_dense(method)) return 0;
  const HopList hops = hops_of(method);
  return token_runs(method, grid) *
         (num_path_counts(hops, grid.places(0, 1), hops.size) + grid.ranks());
}

HopTable hop_table(ExchangeMethod method,
                   const NodeGrid& grid,
                   std::span<const std::int32_t> counts) {
  const int runs = token_runs(method, grid);
  const std::int64_t all = num_counts(method, grid), n = all / runs;
  MOESAIC_CHECK(static_cast<std::int64_t>(counts.size()) == all * grid.ranks(),
                "counts of another exchange");
  HopTable table = empty_table(method, grid);
  for (int rank = 0; rank < grid.ranks(); ++rank) {
    for (int run = 0; run < runs; ++run) {
      const std::int32_t* own = counts.data() + rank * all + run * n;
      Walk{method, hops_of(method), grid, table, rank, run}.go(own, 0, 0, 1, {rank});
      for (int to = 0; to < grid.ranks(); ++to)
        table.copies[static_cast<std::size_t>(to)] += own[n - grid.ranks() + to];
    }
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
  if (!fans_out(method)) return table;
  for (int from = 0; from < grid.ranks(); ++from) {
    for (int lot = 0; lot < table.lots; ++lot) {
      const std::int64_t rows =
          run_begin(method, grid, tokens, lot + 1) - run_begin(method, grid, tokens, lot);
      for (int node = 0; node < grid.nodes; ++node)
        table.crossed_at(from, node, lot) = rows;
      for (int to = 0; to < grid.ranks(); ++to)
        table.fanned_at(from, lot, to) = rows;
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
