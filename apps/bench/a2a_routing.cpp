#include "apps/bench/a2a_routing.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/base/random.h"

namespace moesaic::bench {

TokenChoices draw_choices(const RoutingOptions& o, int rank) {
  // The k largest of log weight + Gumbel noise are k draws without replacement.
  std::vector<double> log_weight(static_cast<std::size_t>(o.experts));
  std::vector<std::pair<double, std::size_t>> order;
  for (std::size_t e = 0; e < log_weight.size(); ++e)
    order.emplace_back(uniform(mix64(o.seed), e), e);
  std::sort(order.begin(), order.end());
  for (std::size_t i = 0; i < order.size(); ++i)
    log_weight[order[i].second] = -o.zipf * std::log(static_cast<double>(i + 1));
  TokenChoices choices{o.choices, {}};
  const std::uint64_t key = mix64(o.seed + 1 + static_cast<std::uint64_t>(rank));
  std::vector<std::pair<double, std::int32_t>> scores(log_weight.size());
  for (std::int64_t t = 0; t < o.tokens; ++t) {
    for (std::size_t e = 0; e < scores.size(); ++e) {
      const double u =
          uniform(key, static_cast<std::uint64_t>(t * o.experts) + e) + 0x1p-54;  // never 0
      scores[e] = {log_weight[e] - std::log(-std::log(u)), static_cast<std::int32_t>(e)};
    }
    std::partial_sort(scores.begin(), scores.begin() + o.choices, scores.end(), std::greater<>());
    for (std::int64_t j = 0; j < o.choices; ++j)
      choices.places.push_back(scores[static_cast<std::size_t>(j)].second);
  }
  return choices;
}

std::vector<double> earlier_load(const RoutingOptions& o, int ranks) {
  std::vector<double> load(static_cast<std::size_t>(o.experts));
  for (int r = 0; r < ranks; ++r) {
    for (const std::int32_t e : draw_choices(o, ranks + r).places)
      load[static_cast<std::size_t>(e)] += 1;
  }
  return load;
}

Traffic count_rows(ExchangeMethod method,
                   const NodeGrid& grid,
                   const RoutingOptions& options,
                   const std::vector<TokenChoices>& ranks,
                   int rank) {
  if (!is_dense(method)) {
    const auto per_rank = static_cast<std::int32_t>(options.experts / grid.ranks());
    return route_tokens(method, grid, per_rank, ranks).sent_by(rank, grid, 1);
  }
  // Every token to every rank, or to every node and there to every rank.
  Traffic rows;
  const std::int64_t tokens = options.tokens, l = grid.per_node, n = grid.nodes;
  const bool flat = method == ExchangeMethod::dense;
  rows.add(Link::self, flat ? tokens : tokens * (1 + n), 1);
  rows.add(Link::node, tokens * (l - 1) * (flat ? 1 : n), 1);
  rows.add(Link::network, flat ? tokens * (n - 1) * l : tokens * (n - 1), 1);
  return rows;
}

}  // namespace moesaic::bench
