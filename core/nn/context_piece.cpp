#include "core/nn/context_piece.h"

#include <algorithm>

#include "core/base/error.h"

namespace moesaic {
namespace {

// The piece that holds a token.
int piece_of(std::span<const std::int64_t> cuts, std::int64_t token) {
  return static_cast<int>(std::upper_bound(cuts.begin(), cuts.end(), token) - cuts.begin()) - 1;
}

}  // namespace

ContextPiece context_piece(std::span<const std::int32_t> documents,
                           std::span<const std::int64_t> cuts,
                           int piece) {
  MOESAIC_CHECK(piece >= 0 && static_cast<std::size_t>(piece) + 1 < cuts.size(), "no such piece");
  MOESAIC_CHECK(documents.size() >= 2 && documents.front() == 0 && cuts.front() == 0 &&
                    documents.back() == cuts.back(),
                "documents and cuts cover different tokens");
  ContextPiece p;
  p.begin = cuts[static_cast<std::size_t>(piece)];
  p.end = cuts[static_cast<std::size_t>(piece) + 1];
  MOESAIC_CHECK(p.begin < p.end, "a piece without tokens");
  p.cu.push_back(0);
  p.keys = documents_before(documents, p.end);
  for (const std::int32_t c : documents) {
    const auto inside = static_cast<std::int32_t>(c - p.begin);
    if (c > p.begin && c < p.end && inside != p.cu.back()) p.cu.push_back(inside);
  }
  p.cu.push_back(static_cast<std::int32_t>(p.end - p.begin));
  const auto starts_at_or_before = [&](std::int64_t token) {
    return std::int64_t{*(std::upper_bound(documents.begin(), documents.end(), token) - 1)};
  };
  const std::int64_t first = starts_at_or_before(p.begin), last = starts_at_or_before(p.end - 1),
                     end = *std::lower_bound(documents.begin(), documents.end(), p.end);
  p.links = {.rank = piece,
             .first = piece_of(cuts, first),
             .last = piece_of(cuts, end - 1),
             .last_tokens = p.end - std::max(last, p.begin)};
  return p;
}

std::vector<std::int32_t> documents_before(std::span<const std::int32_t> documents,
                                           std::int64_t tokens) {
  std::vector<std::int32_t> before;
  for (const std::int32_t c : documents) {
    if (c < tokens) before.push_back(c);
  }
  before.push_back(static_cast<std::int32_t>(tokens));
  return before;
}

namespace {

// Keys that the queries [begin, end) see together: each those of its document up to itself.
std::int64_t pairs(std::span<const std::int32_t> documents, std::int64_t begin, std::int64_t end) {
  std::int64_t sum = 0;
  for (std::size_t n = 0; n + 1 < documents.size(); ++n) {
    const std::int64_t first = std::max<std::int64_t>(begin, documents[n]),
                       last = std::min<std::int64_t>(end, documents[n + 1]);
    if (first < last)
      sum += (first + last + 1 - 2 * std::int64_t{documents[n]}) * (last - first) / 2;
  }
  return sum;
}

}  // namespace

QueryLoan query_loan(std::span<const std::int32_t> documents,
                     std::span<const std::int64_t> cuts,
                     int piece) {
  const int pieces = static_cast<int>(cuts.size()) - 1, partner = pieces - 1 - piece;
  if (partner == piece) return {};
  const auto range = [&](int r) {
    return std::pair{cuts[static_cast<std::size_t>(r)], cuts[static_cast<std::size_t>(r) + 1]};
  };
  const auto [begin, end] = range(piece);
  const auto [other_begin, other_end] = range(partner);
  const std::int64_t own = pairs(documents, begin, end),
                     other = pairs(documents, other_begin, other_end);
  QueryLoan loan{.partner = partner, .gives = own > other};
  const std::int64_t first = loan.gives ? begin : other_begin,
                     tokens = (loan.gives ? end : other_end) - first,
                     excess = std::abs(own - other);
  const auto left = [&](std::int64_t rows) {  // of the difference
    return std::abs(excess - 2 * pairs(documents, first, first + rows));
  };
  while (loan.rows + kLoanBlock <= tokens && left(loan.rows + kLoanBlock) < left(loan.rows))
    loan.rows += kLoanBlock;
  return loan;
}

std::vector<std::int64_t> equal_cuts(std::int64_t tokens, int pieces) {
  MOESAIC_CHECK(pieces > 0 && tokens % pieces == 0, "pieces that are not equal");
  std::vector<std::int64_t> cuts;
  for (int i = 0; i <= pieces; ++i)
    cuts.push_back(tokens / pieces * i);
  return cuts;
}

}  // namespace moesaic
