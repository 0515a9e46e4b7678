#include "parallel/dispatch/volumes.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include <fmt/format.h>

namespace moesaic {
namespace {

// Probability that one of `choices` different experts lies in a given set of `set` of all `experts`.
double any_of(double set, std::int64_t experts, std::int64_t choices) {
  double none = 1;
  for (std::int64_t j = 0; j < choices; ++j) {
    const auto left = static_cast<double>(experts - j);
    none *= std::max(0.0, left - set) / left;
  }
  return 1 - none;
}

// Rows per token that one hop sends, by Link.
using HopRows = std::vector<ExpectedRows>;

// Hop 1 of intra_first_3, on average over ranks and tokens: the number p of the node gets a row when a choice lies
// in a node whose turn p is.
ExpectedRows proxy_rows(const NodeGrid& g, std::int64_t experts, std::int64_t choices) {
  ExpectedRows rows;
  const double per_node = static_cast<double>(experts) / g.nodes;
  for (int rank = 0; rank < g.ranks(); ++rank) {
    for (int token = 0; token < g.per_node; ++token) {
      std::vector<int> nodes(static_cast<std::size_t>(g.per_node), 0);
      for (int node = 0; node < g.nodes; ++node) {
        const int p = node == g.node_of(rank) ? g.number_of(rank) : (token + node) % g.per_node;
        ++nodes[static_cast<std::size_t>(p)];
      }
      for (int p = 0; p < g.per_node; ++p) {
        const double sent =
            any_of(per_node * nodes[static_cast<std::size_t>(p)], experts, choices) /
            (g.ranks() * g.per_node);
        (p == g.number_of(rank) ? rows.self : rows.node) += sent;
      }
    }
  }
  return rows;
}

HopRows rows_by_hop(ExchangeMethod method,
                    const NodeGrid& grid,
                    std::int64_t experts,
                    std::int64_t choices) {
  const double n = grid.nodes, l = grid.per_node, r = n * l, k = static_cast<double>(choices);
  const double ranks = expected_groups(grid.ranks(), experts, choices),
               nodes = expected_groups(grid.nodes, experts, choices),
               numbers = expected_groups(grid.per_node, experts, choices);
  const auto along_rail = [&](double rows) {
    return ExpectedRows{rows / n, 0, rows * (n - 1) / n};
  };
  const auto in_node = [&](double rows) { return ExpectedRows{rows / l, rows * (l - 1) / l, 0}; };
  const auto anywhere = [&](double rows) {
    return ExpectedRows{rows / r, rows * (l - 1) / r, rows * (n - 1) / n};
  };
  switch (method) {
    case ExchangeMethod::pair:
      return {anywhere(k)};
    case ExchangeMethod::flat:
      return {anywhere(ranks)};
    case ExchangeMethod::dense:
      return {anywhere(r)};
    case ExchangeMethod::hdense:
      return {along_rail(n), in_node(r)};
    case ExchangeMethod::intra_first:
      return {in_node(numbers), along_rail(ranks)};
    case ExchangeMethod::intra_first_3:
      return {proxy_rows(grid, experts, choices), along_rail(nodes), in_node(ranks)};
    case ExchangeMethod::inter_first:
      break;
  }
  return {along_rail(nodes), in_node(ranks)};
}

}  // namespace

double expected_groups(std::int64_t groups, std::int64_t experts, std::int64_t choices) {
  const double size = static_cast<double>(experts) / static_cast<double>(groups);
  return static_cast<double>(groups) * any_of(size, experts, choices);
}

ExpectedRows expected_rows(ExchangeMethod method,
                           const NodeGrid& grid,
                           std::int64_t experts,
                           std::int64_t choices) {
  ExpectedRows sum;
  for (const ExpectedRows& hop : rows_by_hop(method, grid, experts, choices)) {
    sum.self += hop.self;
    sum.node += hop.node;
    sum.network += hop.network;
  }
  return sum;
}

double expected_seconds(ExchangeMethod method,
                        const NodeGrid& grid,
                        std::int64_t experts,
                        std::int64_t choices,
                        std::int64_t tokens,
                        std::int64_t row_bytes,
                        const LinkSpeeds& speeds) {
  const auto hops = rows_by_hop(method, grid, experts, choices);
  const double bytes = static_cast<double>(tokens) * static_cast<double>(row_bytes);
  double seconds = is_dense(method) ? 0 : speeds.host_wait;
  for (std::size_t h = 0; h < hops.size(); ++h) {
    const HopKind kind = hops_of(method).kind[h];
    const int near = kind == HopKind::node ? 0 : grid.per_node - 1,
              far = kind == HopKind::owner  ? grid.ranks() - grid.per_node
                    : kind == HopKind::node ? grid.nodes - 1
                                            : 0;
    const double inside = hops[h].node * bytes / speeds.node + near * speeds.node_latency,
                 between = hops[h].network * bytes / speeds.network + far * speeds.network_latency;
    seconds += 2 * std::max(inside, between);
  }
  return seconds;
}

MethodChoice choose_method(const NodeGrid& grid,
                           std::int64_t experts,
                           std::int64_t choices,
                           std::int64_t tokens,
                           std::int64_t row_bytes,
                           const LinkSpeeds& speeds,
                           bool counting) {
  // In the order of preference at equal times.
  std::vector<ExchangeMethod> candidates{ExchangeMethod::dense, ExchangeMethod::flat};
  if (grid.nodes > 1 && grid.per_node > 1) {
    candidates.insert(candidates.end(),
                      {ExchangeMethod::hdense,
                       ExchangeMethod::inter_first,
                       ExchangeMethod::intra_first,
                       ExchangeMethod::intra_first_3});
  }
  if (counting) std::erase_if(candidates, is_dense);
  constexpr double kEqual = 0.98;
  MethodChoice choice;
  double best = 0;
  std::string others;
  for (const ExchangeMethod m : candidates) {
    const double s = expected_seconds(m, grid, experts, choices, tokens, row_bytes, speeds);
    if (best == 0 || s < kEqual * best) {
      best = s;
      choice.method = m;
    }
  }
  for (const ExchangeMethod m : candidates) {
    if (m == choice.method) continue;
    others +=
        fmt::format("{}{} {:.3g} ms",
                    others.empty() ? "" : ", ",
                    name(m),
                    1e3 * expected_seconds(m, grid, experts, choices, tokens, row_bytes, speeds));
  }
  const ExpectedRows rows = expected_rows(choice.method, grid, experts, choices);
  std::string links;
  if (grid.nodes > 1)
    links += fmt::format(
        " {:.2f} rows a token between nodes at {:.3g} GB/s,", rows.network, speeds.network / 1e9);
  if (grid.per_node > 1)
    links +=
        fmt::format(" {:.2f} rows a token inside at {:.3g} GB/s,", rows.node, speeds.node / 1e9);
  choice.reason = fmt::format("{} for {} node{} of {}:{} {:.3g} ms there and back ({})",
                              name(choice.method),
                              grid.nodes,
                              grid.nodes == 1 ? "" : "s",
                              grid.per_node,
                              links,
                              1e3 * best,
                              others);
  return choice;
}

}  // namespace moesaic
