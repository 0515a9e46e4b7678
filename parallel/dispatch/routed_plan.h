#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "parallel/dispatch/method.h"

namespace moesaic {

/// What the tokens of one rank chose: place of the expert (PlaceGrid) per token and choice, -1 = dropped.
struct TokenChoices {
  std::int64_t choices = 0;          ///< per token
  std::vector<std::int32_t> places;  ///< [tokens, choices]
  std::int64_t tokens() const {
    return choices == 0 ? 0 : static_cast<std::int64_t>(places.size()) / choices;
  }
};

/// A row at a rank: a token with the choices that travel with it (-1: not here).
struct RoutedRow {
  int source = 0;  ///< rank of the token
  std::int64_t token = 0;
  std::vector<std::int32_t> places;
};

/// One hop as one rank sees it.
struct RoutedHop {
  std::vector<std::int64_t> send_rows;  ///< [ranks]
  std::vector<std::int32_t> src;        ///< rows to send, by destination, then in their order here
  std::vector<RoutedRow>
      received;  ///< by sender, from this rank on round to the one before, in the order of its list; in a hop that fans
                 ///< rows out of another node, first by the part of the rows (HopTable::lots)
};

/// From the choices of all ranks to everything that is sent: hops[hop][rank]. A pure function, for any method,
/// grid and routing, in the order of definitions rather than of speed: what ExpertExchange must do, and where
/// bytes are counted from the routing itself.
struct RoutedPlan {
  std::vector<std::vector<RoutedHop>> hops;

  /// Rows that the hops of one rank send in one direction, each of `row_bytes`.
  Traffic sent_by(int rank, const NodeGrid& grid, std::int64_t row_bytes) const;
};
RoutedPlan route_tokens(ExchangeMethod method,
                        const NodeGrid& grid,
                        std::int32_t places_per_rank,
                        std::span<const TokenChoices> ranks);

}  // namespace moesaic
