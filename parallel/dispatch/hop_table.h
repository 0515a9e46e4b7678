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
  // --- where rows fan out behind the hop between nodes: of the lots of rank `from` before that hop (slow_lots())
  int nodes = 1, lots = 1;
  std::vector<std::int64_t> crossed;  ///< [from, node, lot] rows for the node
  std::vector<std::int64_t> fanned;   ///< [from, lot, to] of them, those for rank `to`

  std::int64_t at(std::size_t hop, int from, int to) const {
    return rows[hop][static_cast<std::size_t>(from * ranks + to)];
  }
  std::int64_t& crossed_at(int from, int node, int lot) {
    return crossed[static_cast<std::size_t>((from * nodes + node) * lots + lot)];
  }
  std::int64_t crossed_at(int from, int node, int lot) const {
    return crossed[static_cast<std::size_t>((from * nodes + node) * lots + lot)];
  }
  std::int64_t& fanned_at(int from, int lot, int to) {
    return fanned[static_cast<std::size_t>((from * lots + lot) * ranks + to)];
  }
  std::int64_t fanned_at(int from, int lot, int to) const {
    return fanned[static_cast<std::size_t>((from * lots + lot) * ranks + to)];
  }
};

/// Lots in which a rank's rows cross to another node, where the last hop fans them out: enough for about eight from all others,
/// so that few nodes too have something to work at before all is there. They depend on method and grid alone, since the
/// order of rows at their experts follows from them.
///   inter_first, hdense  runs of its tokens
///   intra_first_3        what comes through it from the ranks of its node, from itself on round, and if these are few,
///                        of each the runs of its tokens; else of several of them together
int slow_lots(ExchangeMethod method, const NodeGrid& grid) noexcept;
/// Runs of a rank's tokens whose lots differ, of about equal length, and where one begins.
int token_runs(ExchangeMethod method, const NodeGrid& grid) noexcept;
std::int64_t run_begin(ExchangeMethod method,
                       const NodeGrid& grid,
                       std::int64_t tokens,
                       int run) noexcept;
/// The lot of tokens of a run of rank `source` that cross from rank `from`.
int lot_of(ExchangeMethod method, const NodeGrid& grid, int source, int run, int from) noexcept;

/// Elements of a rank's row of counts, for each of its runs those of ExchangeCounts; 0 for the dense methods.
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
