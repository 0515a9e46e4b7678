#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/nn/sequence.h"

namespace moesaic {

/// What the documents of a micro-batch are to one of the contiguous pieces that it is cut into.
struct ContextPiece {
  std::int64_t begin = 0, end = 0;  ///< tokens of the micro-batch
  std::vector<std::int32_t> cu;     ///< documents of the piece, from 0; none is empty
  std::vector<std::int32_t> keys;   ///< documents of all tokens before `end`
  PieceLinks links;
};

/// `documents`: boundaries 0 = c_0 <= … <= c_N = T. `cuts`: 0 = t_0 < … < t_R = T, piece r is [t_r, t_(r+1)).
ContextPiece context_piece(std::span<const std::int32_t> documents,
                           std::span<const std::int64_t> cuts,
                           int piece);
/// Document boundaries of the first `tokens` tokens.
std::vector<std::int32_t> documents_before(std::span<const std::int32_t> documents,
                                           std::int64_t tokens);
/// Pairs pieces from both ends, r and R-1-r; the one whose tokens see more keys in all gives away as many of its first
/// queries, in blocks of kLoanBlock, as make the two most nearly equal.
constexpr std::int64_t kLoanBlock = 64;
QueryLoan query_loan(std::span<const std::int32_t> documents,
                     std::span<const std::int64_t> cuts,
                     int piece);
/// The cuts of R equal pieces.
std::vector<std::int64_t> equal_cuts(std::int64_t tokens, int pieces);

}  // namespace moesaic
