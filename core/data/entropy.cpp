#include "core/data/entropy.h"

#include <algorithm>
#include <cmath>

#include "core/base/error.h"

namespace moesaic::data {
namespace {

double add_one(const TokenCounts& train, std::int32_t token) {
  return static_cast<double>(train.count(token) + 1) /
         static_cast<double>(train.total() + train.vocab_size());
}

// Sum over pairs of the text of count * -ln p(a, b), per token.
template <class P>
double mean_pair_loss(const TokenCounts& text, const P& row_of) {
  MOESAIC_CHECK(text.total() > 0, "entropy of an empty text");
  double sum = 0;
  for (std::int32_t a = 0; a < text.vocab_size(); ++a) {
    const auto probability = row_of(a);
    for (std::int32_t b = 0; b < text.vocab_size(); ++b) {
      if (const auto n = text.count(a, b); n > 0)
        sum -= static_cast<double>(n) * std::log(probability(b));
    }
  }
  return sum / static_cast<double>(text.total());
}

struct Row {
  std::int64_t total = 0;
  std::int64_t distinct = 0;
};
Row row_totals(const TokenCounts& counts, std::int32_t previous) {
  Row r;
  for (std::int32_t b = 0; b < counts.vocab_size(); ++b) {
    r.total += counts.count(previous, b);
    r.distinct += counts.count(previous, b) > 0 ? 1 : 0;
  }
  return r;
}

}  // namespace

TokenCounts::TokenCounts(std::int32_t vocab_size) : vocab_size_(vocab_size) {
  MOESAIC_CHECK(vocab_size >= 1 && vocab_size <= 4096, "pair counts need a vocabulary of 1 … 4096");
  const auto v = static_cast<std::size_t>(vocab_size);
  unigram_.resize(v);
  bigram_.resize(v * v);
}

void TokenCounts::add_pair(std::int32_t previous, std::int32_t token) {
  MOESAIC_CHECK(0 <= previous && previous < vocab_size_ && 0 <= token && token < vocab_size_,
                "token outside the vocabulary");
  ++unigram_[static_cast<std::size_t>(token)];
  ++bigram_[static_cast<std::size_t>(previous) * static_cast<std::size_t>(vocab_size_) +
            static_cast<std::size_t>(token)];
  ++total_;
}

void TokenCounts::add(const TokenSource& source) {
  constexpr std::int64_t kBlock = 4096;
  std::vector<std::int32_t> block(kBlock);
  for (std::int64_t d = 0; d < source.num_documents(); ++d) {
    const std::int64_t length = source.document_length(d);
    std::int32_t previous = kIgnoredLabel;
    for (std::int64_t at = 0; at < length; at += kBlock) {
      const auto n = static_cast<std::size_t>(std::min(kBlock, length - at));
      source.read(d, at, std::span(block).first(n));
      for (std::size_t i = 0; i < n; ++i) {
        if (previous != kIgnoredLabel) add_pair(previous, block[i]);
        previous = block[i];
      }
    }
  }
}

void TokenCounts::add(const Batch& batch) {
  for (std::size_t i = 0; i < batch.tokens.size(); ++i) {
    if (batch.labels[i] != kIgnoredLabel) add_pair(batch.tokens[i], batch.labels[i]);
  }
}

double unigram_entropy(const TokenCounts& text) {
  MOESAIC_CHECK(text.total() > 0, "entropy of an empty text");
  const auto total = static_cast<double>(text.total());
  double h = 0;
  for (std::int32_t b = 0; b < text.vocab_size(); ++b) {
    if (const auto n = static_cast<double>(text.count(b)); n > 0)
      h -= n / total * std::log(n / total);
  }
  return h;
}

double bigram_entropy(const TokenCounts& text) {
  return mean_pair_loss(text, [&](std::int32_t a) {
    const auto all = static_cast<double>(row_totals(text, a).total);
    return [&text, a, all](std::int32_t b) { return static_cast<double>(text.count(a, b)) / all; };
  });
}

double unigram_cross_entropy(const TokenCounts& train, const TokenCounts& text) {
  MOESAIC_CHECK(train.vocab_size() == text.vocab_size(), "texts of two vocabularies");
  return mean_pair_loss(
      text, [&](std::int32_t) { return [&train](std::int32_t b) { return add_one(train, b); }; });
}

double bigram_cross_entropy(const TokenCounts& train, const TokenCounts& text) {
  MOESAIC_CHECK(train.vocab_size() == text.vocab_size(), "texts of two vocabularies");
  return mean_pair_loss(text, [&](std::int32_t a) {
    return [&train, a, row = row_totals(train, a)](std::int32_t b) {
      const double base = add_one(train, b);
      if (row.total == 0) return base;
      const auto distinct = static_cast<double>(row.distinct);
      return (static_cast<double>(train.count(a, b)) + distinct * base) /
             (static_cast<double>(row.total) + distinct);
    };
  });
}

}  // namespace moesaic::data
