#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "apps/eval/choice_set.h"
#include "apps/loaded_model.h"
#include "comm/communicator.h"
#include "core/data/dataset.h"
#include "core/train/evaluation.h"
#include "core/train/run_sink.h"

namespace moesaic::apps::eval {

/// How many bytes of text every token stands for; special tokens, and ids that are no token, stand for none.
class TokenBytes {
 public:
  TokenBytes(const tokenizer::Tokenizer& tokenizer, std::int64_t vocabulary);
  std::int64_t of_labels(const data::Batch& batch) const;

 private:
  std::vector<std::int32_t> bytes_;
};

/// What a model makes of a data set.
struct DataScore {
  EvalStats stats;
  std::optional<std::int64_t>
      bytes;  ///< of text that the predicted tokens stand for, where the tokenizer is known
  double perplexity() const;
  std::optional<double> bits_per_byte() const;
};

/// Scores with a model on all ranks: every rank has the whole model and calls with the same arguments, the batches are dealt
/// out, and every rank gets the same result, whose bits do not depend on the number of ranks.
class Scorer {
 public:
  Scorer(LoadedModel& model, Communicator& world) : model_(model), world_(world) {}

  /// The loss over all windows, `micro` at once. `token_bytes` may be null. Throws NumericsError when it is not finite; `name`
  /// is for that message.
  DataScore score(const std::string& name,
                  const data::ValidationSet& windows,
                  std::int64_t micro,
                  const TokenBytes* token_bytes,
                  Progress* progress = nullptr);
  /// log p of the scored tokens of every text, summed in f64, nats. Throws NumericsError when one is not finite.
  std::vector<double> score(const ChoiceSet& set,
                            const PackedTexts& packed,
                            Progress* progress = nullptr);

 private:
  std::vector<double> score_batch(const ChoiceSet& set,
                                  const PackedTexts& packed,
                                  const TextRange& range);

  LoadedModel& model_;
  Communicator& world_;
};

}  // namespace moesaic::apps::eval
