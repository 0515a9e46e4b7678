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

TEST_CASE("query loans: both of a pair agree, and share what one alone would do") {
  const auto pairs = [](const Ints& documents, std::int64_t begin, std::int64_t end) {
    std::int64_t sum = 0;
    for (std::int64_t t = begin; t < end; ++t) {
      std::size_t n = 0;
      while (documents[n + 1] <= t)
        ++n;
      sum += t + 1 - documents[n];
    }
    return sum;
  };
  const auto check = [&](const Ints& documents, int pieces) {
    const auto cuts = equal_cuts(documents.back(), pieces);
    for (int r = 0; r < pieces; ++r) {
      const QueryLoan mine = query_loan(documents, cuts, r);
      if (mine.partner < 0) {
        CHECK(2 * r + 1 == pieces);
        continue;
      }
      const QueryLoan theirs = query_loan(documents, cuts, mine.partner);
      REQUIRE(theirs.partner == r);
      REQUIRE(theirs.rows == mine.rows);
      if (mine.rows == 0) continue;
      REQUIRE(theirs.gives != mine.gives);
      if (!mine.gives) continue;
      const std::int64_t begin = cuts[static_cast<std::size_t>(r)],
                         end = cuts[static_cast<std::size_t>(r) + 1],
                         other = cuts[static_cast<std::size_t>(mine.partner)],
                         own_work = pairs(documents, begin, end),
                         their_work = pairs(documents, other, other + end - begin),
                         lent = pairs(documents, begin, begin + mine.rows);
      CHECK(std::max(own_work - lent, their_work + lent) < own_work);
      // No nearer with a block more or less, and so within a block's work of each other.
      const std::int64_t block =
          pairs(documents, end - kLoanBlock, end) + pairs(documents, begin, begin + kLoanBlock);
      CHECK(std::abs(own_work - their_work - 2 * lent) <= block);
    }
  };
  check({0, 2048}, 2);
  check({0, 2048}, 4);
  check({0, 3072}, 3);
  check({0, 100, 1000, 2048}, 8);
  check({0, 1024, 2048}, 2);  // equal work
  CHECK(query_loan(Ints{0, 1024, 2048}, equal_cuts(2048, 2), 0).rows == 0);
  // The earlier piece may be the one with more to do.
  check({0, 1000, 1030, 1060, 1100, 1200, 2000, 2048}, 2);
  CHECK(query_loan(Ints{0, 1024, 1034, 1500, 2048}, equal_cuts(2048, 2), 0).gives);
  // As of all 2048 queries together: a fourth of the pairs is in the first half.
  const QueryLoan half = query_loan(Ints{0, 2048}, equal_cuts(2048, 2), 1);
  CHECK(half.gives);
  CHECK(half.rows == 448);
}
