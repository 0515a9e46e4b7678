#pragma once
#include <cstdint>
#include <vector>

#include "core/data/dataset.h"
#include "core/data/token_source.h"

namespace moesaic::data {

/// Counts of the predicted tokens x_t and of the pairs (x_{t-1}, x_t): every token of a document
/// but its first, the end-of-text token included: what the loss of a language model is averaged
/// over.
class TokenCounts {
 public:
  /// vocab_size <= 4096: the pair counts are a dense table.
  explicit TokenCounts(std::int32_t vocab_size = kByteVocabulary);
  void add(const TokenSource& source);
  void add(const Batch& batch);

  std::int32_t vocab_size() const noexcept { return vocab_size_; }
  std::int64_t total() const noexcept { return total_; }
  std::int64_t count(std::int32_t token) const { return unigram_[static_cast<std::size_t>(token)]; }
  std::int64_t count(std::int32_t previous, std::int32_t token) const {
    return bigram_[static_cast<std::size_t>(previous) * static_cast<std::size_t>(vocab_size_) +
                   static_cast<std::size_t>(token)];
  }

 private:
  void add_pair(std::int32_t previous, std::int32_t token);
  std::int32_t vocab_size_;
  std::int64_t total_ = 0;
  std::vector<std::int64_t> unigram_, bigram_;
};

/// H(x_t) = - sum_b p(b) ln p(b) with the text's own frequencies; nats per token.
double unigram_entropy(const TokenCounts& text);
/// H(x_t | x_{t-1}) = - sum_ab p(ab) ln p(b|a) with the text's own frequencies; nats per token. No
/// model that sees one previous token only can do better on this text.
double bigram_entropy(const TokenCounts& text);

/// Mean of - ln p(x_t) over `text`, p from `train` with add-one smoothing: (c(b) + 1) / (N + V).
double unigram_cross_entropy(const TokenCounts& train, const TokenCounts& text);
/// Mean of - ln p(x_t | x_{t-1}) over `text`, p from `train` with Witten-Bell smoothing: (c(ab) +
/// D(a) p(b)) / (c(a) + D(a)), D(a) = distinct successors of a, p(b) the add-one unigram model,
/// which alone serves an `a` never seen.
double bigram_cross_entropy(const TokenCounts& train, const TokenCounts& text);

}  // namespace moesaic::data
