#include "apps/eval/scorer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/data/token_source.h"

namespace moesaic::apps::eval {
namespace {

// The sign of a NaN says nothing.
std::string shown(double value) {
  return std::isnan(value) ? "nan" : fmt::format("{}", value);
}

constexpr const char* kBroken =
    "this checkpoint holds broken weights; take an earlier one with --step";

}  // namespace

TokenBytes::TokenBytes(const tokenizer::Tokenizer& tokenizer, std::int64_t vocabulary) {
  const std::int64_t ids = std::min(vocabulary, tokenizer.vocab_size());
  for (std::int32_t id = 0; id < ids; ++id) {
    std::size_t bytes = 0;
    try {
      bytes = tokenizer.decode({&id, 1}, true).size();
    } catch (const InputError&) {  // vocabularies may have gaps
    }
    bytes_.push_back(static_cast<std::int32_t>(bytes));
  }
}

std::int64_t TokenBytes::of_labels(const data::Batch& batch) const {
  std::int64_t bytes = 0;
  for (const std::int32_t label : batch.labels) {
    if (label >= 0 && static_cast<std::size_t>(label) < bytes_.size())
      bytes += bytes_[static_cast<std::size_t>(label)];
  }
  return bytes;
}

double DataScore::perplexity() const {
  return std::exp(stats.loss);
}

std::optional<double> DataScore::bits_per_byte() const {
  if (!bytes || *bytes == 0) return std::nullopt;
  return stats.loss * static_cast<double>(stats.predicted_tokens) / std::log(2.0) /
         static_cast<double>(*bytes);
}

DataScore Scorer::score(const std::string& name,
                        const data::ValidationSet& windows,
                        std::int64_t micro,
                        const TokenBytes* token_bytes,
                        Progress* progress) {
  DataScore score;
  std::int64_t bytes = 0;
  score.stats = evaluate_windows(
      windows,
      micro,
      &world_,
      false,
      [&](const data::Batch& batch) {
        if (token_bytes != nullptr) bytes += token_bytes->of_labels(batch);
        return model_.loss(batch);
      },
      progress);
  if (token_bytes != nullptr) score.bytes = world_.all_reduce_host(bytes, ReduceOp::sum);
  if (!std::isfinite(score.stats.loss))
    throw NumericsError(
        fmt::format("the loss on {} is {}: {}", name, shown(score.stats.loss), kBroken));
  return score;
}

// The scores of the texts of one batch.
std::vector<double> Scorer::score_batch(const ChoiceSet& set,
                                        const PackedTexts& packed,
                                        const TextRange& range) {
  const std::vector<double> logp = model_.log_probabilities(packed.batch(range));
  std::vector<double> sums;
  std::size_t row = 0;
  for (std::size_t i = range.first; i < range.last; ++i) {
    double sum = 0;
    for (std::int64_t t = 0; t < set.texts()[i].length(); ++t)
      sum += logp[row++];  // 0 where nothing is scored
    sums.push_back(sum);
  }
  return sums;
}

std::vector<double> Scorer::score(const ChoiceSet& set,
                                  const PackedTexts& packed,
                                  Progress* progress) {
  const auto rank = static_cast<std::size_t>(world_.rank()),
             ranks = static_cast<std::size_t>(world_.size());
  const auto& batches = packed.batches();
  if (progress != nullptr)
    progress->set_total(static_cast<std::int64_t>((batches.size() - rank + ranks - 1) / ranks));
  std::vector<double> own;  // this rank's batches, one after the other
  for (std::size_t b = rank; b < batches.size(); b += ranks) {
    const std::vector<double> sums = score_batch(set, packed, batches[b]);
    own.insert(own.end(), sums.begin(), sums.end());
    if (progress != nullptr) progress->add(1);
  }
  const std::vector<std::string> all = world_.all_gather_host(
      {reinterpret_cast<const char*>(own.data()), own.size() * sizeof(double)});
  std::vector<std::size_t> taken(ranks, 0);  // bytes
  std::vector<double> logp(set.texts().size());
  for (std::size_t b = 0; b < batches.size(); ++b) {
    const std::size_t bytes = (batches[b].last - batches[b].first) * sizeof(double);
    std::size_t& at = taken[b % ranks];
    MOESAIC_CHECK(at + bytes <= all[b % ranks].size(), "a rank sent fewer scores than it has");
    std::memcpy(logp.data() + batches[b].first, all[b % ranks].data() + at, bytes);
    at += bytes;
  }
  for (const Question& question : set.questions()) {
    for (std::size_t i = 0; i < question.count; ++i) {
      const double score = logp[question.first + i];
      if (!std::isfinite(score))
        throw NumericsError(fmt::format("{}:{}: the log-probability of choice {} is {}: {}",
                                        set.path(),
                                        question.line,
                                        i,
                                        shown(score),
                                        kBroken));
    }
  }
  return logp;
}

}  // namespace moesaic::apps::eval
