#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "parallel/dispatch/method.h"

namespace moesaic {

/// Who sends how many rows to whom in every hop of an exchange. Every rank derives the same table from
/// the same counts, so both sides of a message agree on its size.
struct HopTable {
  int ranks = 1;
  std::vector<std::vector<std::int64_t>> rows;  ///< [hop][from * ranks + to]
  std::vector<std::int64_t> copies;             ///< [rank] choices that its experts get

  std::int64_t at(std::size_t hop, int from, int to) const {
    return rows[hop][static_cast<std::size_t>(from * ranks + to)];
  }
};

/// Elements of a rank's row of counts (ExchangeCounts); 0 for the dense methods.
std::int64_t num_counts(ExchangeMethod method, const NodeGrid& grid);

/// From the rows of counts of all ranks, one after the other. Throws InternalError for a negative count.
HopTable hop_table(ExchangeMethod method,
                   const NodeGrid& grid,
                   std::span<const std::int32_t> counts);

/// Of a dense method, where each rank has `tokens` rows.
HopTable dense_hop_table(ExchangeMethod method, const NodeGrid& grid, std::int64_t tokens);

/// Rows that a rank can hold at most before hop `hop` (0 = its own tokens), of `tokens` at most per rank,
/// whatever the routing; hop = number of hops: what its experts get.
std::int64_t most_rows(ExchangeMethod method,
                       const NodeGrid& grid,
                       std::int64_t tokens,
                       std::int64_t choices,
                       int hop);
/// Rows that it can send at most in that hop.
std::int64_t most_items(ExchangeMethod method,
                        const NodeGrid& grid,
                        std::int64_t tokens,
                        std::int64_t choices,
                        int hop);

}  // namespace moesaic
