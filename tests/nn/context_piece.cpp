#include "core/nn/context_piece.h"

#include "core/base/random.h"
#include "tests/support/catch.h"

using namespace moesaic;

namespace {

using Ints = std::vector<std::int32_t>;

ContextPiece piece(const Ints& documents, const std::vector<std::int64_t>& cuts, int r) {
  return context_piece(documents, cuts, r);
}

}  // namespace

TEST_CASE("context piece: documents that cross, end at, and lie between cuts") {
  const std::vector<std::int64_t> cuts{0, 4, 8, 12, 16};
  const Ints documents{0, 4, 5, 5, 13, 16};
  const auto a = piece(documents, cuts, 0), b = piece(documents, cuts, 1),
             c = piece(documents, cuts, 2), d = piece(documents, cuts, 3);
  CHECK(a.cu == Ints{0, 4});
  CHECK(a.keys == Ints{0, 4});
  CHECK_FALSE(a.links.continued());  // ends exactly at the cut
  CHECK(b.cu == Ints{0, 1, 4});      // the empty document is of no piece
  CHECK(b.keys == Ints{0, 4, 5, 5, 8});
  CHECK_FALSE(b.links.continues());
  CHECK(b.links.last == 3);
  CHECK(b.links.last_tokens == 3);
  CHECK(c.cu == Ints{0, 4});  // the whole piece lies inside one document
  CHECK(c.links.first == 1);
  CHECK(c.links.last == 3);
  CHECK(c.links.last_tokens == 4);
  CHECK(d.cu == Ints{0, 1, 4});
  CHECK(d.links.first == 1);
  CHECK(d.links.last == 3);
  CHECK_FALSE(d.links.continued());
  CHECK(d.links.last_tokens == 3);
}

TEST_CASE("context piece: any documents and cuts agree with every token's own document") {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    std::uint64_t draws = 0;
    const auto draw = [&](std::int64_t n) {
      return static_cast<std::int64_t>(uniform(seed, draws++) * static_cast<double>(n));
    };
    std::vector<std::int64_t> cuts{0};
    for (std::int64_t r = 1 + draw(5); r > 0; --r)
      cuts.push_back(cuts.back() + 1 + draw(9));
    const std::int64_t tokens = cuts.back();
    Ints documents{0};
    while (documents.back() < tokens)
      documents.push_back(
          static_cast<std::int32_t>(std::min<std::int64_t>(tokens, documents.back() + draw(8))));
    const auto document_of = [&](std::int64_t t) {
      std::size_t n = 0;
      while (documents[n + 1] <= t)
        ++n;
      return n;
    };
    const auto piece_of = [&](std::int64_t t) {
      int r = 0;
      while (cuts[static_cast<std::size_t>(r) + 1] <= t)
        ++r;
      return r;
    };
    for (int r = 0; r + 1 < static_cast<int>(cuts.size()); ++r) {
      const ContextPiece p = piece(documents, cuts, r);
      for (std::int64_t t = p.begin; t < p.end; ++t) {
        std::size_t n = 0;  // the token's document in the piece
        while (p.begin + p.cu[n + 1] <= t)
          ++n;
        const std::int64_t begin = documents[document_of(t)];
        REQUIRE(p.begin + p.cu[n] == std::max(begin, p.begin));
      }
      const std::size_t first = document_of(p.begin), last = document_of(p.end - 1);
      REQUIRE(p.links.rank == r);
      REQUIRE(p.links.first == piece_of(documents[first]));
      REQUIRE(p.links.last == piece_of(documents[last + 1] - 1));
      REQUIRE(p.links.last_tokens == p.end - std::max<std::int64_t>(documents[last], p.begin));
      REQUIRE(p.keys.back() == p.end);
      REQUIRE(p.keys[p.keys.size() - 2] == documents[last]);
    }
  }
}
