#pragma once
#include <cstdint>
#include <vector>

#include "parallel/dispatch/routed_plan.h"

namespace moesaic::bench {

/// A synthetic router: the expert of rank i in popularity is chosen with weight 1 / (i + 1)^zipf, a token's choices are
/// different experts. Popular experts are spread over the ranks at random.
struct RoutingOptions {
  std::int64_t experts = 64, choices = 16, tokens = 96;
  double zipf = 0;
  std::uint64_t seed = 1;
};

/// The choices of one rank's tokens, a function of options and rank; the weights are drawn by the caller.
TokenChoices draw_choices(const RoutingOptions& options, int rank);

/// How often each expert is chosen by all ranks' tokens before those of draw_choices(), as many.
std::vector<double> earlier_load(const RoutingOptions& options, int ranks);

/// Rows that one dispatch sends from `rank`, counted from the choices of all ranks.
Traffic count_rows(ExchangeMethod method,
                   const NodeGrid& grid,
                   const RoutingOptions& options,
                   const std::vector<TokenChoices>& ranks,
                   int rank);

}  // namespace moesaic::bench
