#include "core/data/entropy.h"

#include <cmath>

#include "tests/support/catch.h"

namespace moesaic::data {
namespace {

Batch batch_of(std::vector<std::int32_t> tokens, std::vector<std::int32_t> labels) {
  Batch b;
  b.tokens = std::move(tokens);
  b.labels = std::move(labels);
  return b;
}

TEST_CASE("entropies of small texts follow their formulas") {
  // Pairs: 1->2 three times, 1->3 once, 2->1 four times.
  TokenCounts text(4);
  text.add(batch_of({1, 1, 1, 1, 2, 2, 2, 2, 3}, {2, 2, 2, 3, 1, 1, 1, 1, kIgnoredLabel}));
  REQUIRE(text.total() == 8);
  const double h = -(0.5 * std::log(0.5) + 0.375 * std::log(0.375) + 0.125 * std::log(0.125));
  REQUIRE(unigram_entropy(text) == Approx(h).epsilon(1e-12));
  REQUIRE(bigram_entropy(text) ==
          Approx(-(3 * std::log(0.75) + std::log(0.25)) / 8).epsilon(1e-12));

  // Held out: 1->2, 1->0 (unseen pair), 3->1 (3 never seen as a predecessor).
  TokenCounts held_out(4);
  held_out.add(batch_of({1, 1, 3}, {2, 0, 1}));
  const double p0 = 1.0 / 12, p1 = 5.0 / 12, p2 = 4.0 / 12;
  REQUIRE(unigram_cross_entropy(text, held_out) ==
          Approx(-(std::log(p2) + std::log(p0) + std::log(p1)) / 3).epsilon(1e-12));
  const double q12 = (3 + 2 * p2) / 6, q10 = 2 * p0 / 6;
  REQUIRE(bigram_cross_entropy(text, held_out) ==
          Approx(-(std::log(q12) + std::log(q10) + std::log(p1)) / 3).epsilon(1e-12));
}

TEST_CASE("the smoothed models are distributions and lie above the text's own entropy") {
  TokenCounts train(5), text(5);
  train.add(batch_of({0, 1, 2, 3, 0, 1}, {1, 2, 3, 0, 2, 3}));
  double sum = 0;
  for (std::int32_t b = 0; b < 5; ++b) {
    TokenCounts one(5);
    one.add(batch_of({1}, {b}));
    sum += std::exp(-bigram_cross_entropy(train, one));
  }
  REQUIRE(sum == Approx(1).epsilon(1e-12));
  text.add(batch_of({0, 1, 4, 2, 3, 1}, {1, 2, 0, 3, 4, 2}));
  REQUIRE(unigram_cross_entropy(train, text) > unigram_entropy(text));
  REQUIRE(bigram_cross_entropy(train, text) > bigram_entropy(text));
}

class FakeSource final : public TokenSource {
 public:
  std::int64_t num_documents() const noexcept override { return 2; }
  std::int64_t document_length(std::int64_t) const override { return 5000; }
  void read(std::int64_t, std::int64_t begin, std::span<std::int32_t> out) const override {
    for (std::size_t i = 0; i < out.size(); ++i) {
      const auto at = begin + static_cast<std::int64_t>(i);
      out[i] = at == 4999 ? kEndOfText : 1 + static_cast<std::int32_t>(at % 2);
    }
  }
  const std::string& name() const noexcept override { return name_; }

 private:
  std::string name_ = "fake";
};

TEST_CASE("counts of a source leave out each document's first token and no other") {
  TokenCounts counts(3);
  counts.add(FakeSource());
  REQUIRE(counts.total() == 2 * 4999);
  REQUIRE(counts.count(1, kEndOfText) == 2);
  REQUIRE(counts.count(kEndOfText, 1) == 0);
  REQUIRE(counts.count(1, 2) == 2 * 2499);
  REQUIRE(counts.count(2, 1) == 2 * 2499);
  REQUIRE(bigram_entropy(counts) < 0.01);
  REQUIRE(unigram_entropy(counts) == Approx(std::log(2)).margin(0.01));
}

}  // namespace
}  // namespace moesaic::data
