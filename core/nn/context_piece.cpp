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
  for (const std::int32_t c : documents) {
    if (c < p.end) p.keys.push_back(c);
    const auto inside = static_cast<std::int32_t>(c - p.begin);
    if (c > p.begin && c < p.end && inside != p.cu.back()) p.cu.push_back(inside);
  }
  p.keys.push_back(static_cast<std::int32_t>(p.end));
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

std::vector<std::int64_t> equal_cuts(std::int64_t tokens, int pieces) {
  MOESAIC_CHECK(pieces > 0 && tokens % pieces == 0, "pieces that are not equal");
  std::vector<std::int64_t> cuts;
  for (int i = 0; i <= pieces; ++i)
    cuts.push_back(tokens / pieces * i);
  return cuts;
}

}  // namespace moesaic
