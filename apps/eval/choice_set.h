#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/data/batch.h"
#include "core/tokenizer/tokenizer.h"

namespace moesaic::apps::eval {

/// A context with one of its choices, as the model reads it.
struct ChoiceText {
  std::vector<std::int32_t> tokens;  ///< at most one more than the model's window holds
  std::int64_t first_scored = 1;     ///< log p of the tokens from here on is the choice's
  std::int64_t bytes = 0;            ///< of the choice, UTF-8
  /// Tokens that the model reads: the last one is predicted only.
  std::int64_t length() const { return static_cast<std::int64_t>(tokens.size()) - 1; }
  std::int64_t scored() const { return static_cast<std::int64_t>(tokens.size()) - first_scored; }
};

struct Question {
  std::int64_t line = 0;    ///< of the file, from 1
  std::size_t answer = 0;   ///< the right one of its choices, from 0
  std::size_t first = 0;    ///< its first text in ChoiceSet::texts()
  std::size_t count = 0;    ///< of its choices
  bool cut = false;         ///< the beginning of the context was left out for one choice or more
  bool no_context = false;  ///< so the first token of a choice is given, not predicted
};

/// A file of questions (core/data/choice_record.h; empty lines are passed over) as tokens.
///
/// Context and choice are encoded as one text, without begin-of-text token; text that spells a special token is that token.
/// The choice is what comes behind the tokens that this text has in common with the context alone: a token that reaches from
/// the one into the other is part of the choice. Of a context that is too long for the window, the last tokens are taken. In a
/// text without context the first token is given, as the first of a document is in training.
class ChoiceSet {
 public:
  /// `window`: most tokens that the model reads at once. Throws InputError (file:line) for a bad record, a choice that does
  /// not fit the window, or one without a token that could be predicted; for a file without records.
  ChoiceSet(std::string name,
            std::string path,
            const tokenizer::Tokenizer& tokenizer,
            std::int64_t window);

  const std::string& name() const noexcept { return name_; }
  const std::string& path() const noexcept { return path_; }
  const std::vector<Question>& questions() const noexcept { return questions_; }
  const std::vector<ChoiceText>& texts() const noexcept { return texts_; }
  std::int64_t num_cut() const noexcept;
  std::int64_t num_without_context() const noexcept;

 private:
  void add(std::string_view record, std::int64_t line, tokenizer::Encoder& encoder);
  ChoiceText text_of(const std::vector<std::int32_t>& context,
                     std::vector<std::int32_t> whole,
                     const std::string& where,
                     Question& question) const;

  std::string name_, path_;
  std::int64_t window_;
  std::vector<Question> questions_;
  std::vector<ChoiceText> texts_;
};

/// Texts [first, last) of a set, together in one batch.
struct TextRange {
  std::size_t first = 0, last = 0;
};

/// Texts as documents of packed batches.
class PackedTexts {
 public:
  /// Batches of at most `most_tokens` tokens (no text is longer), in the order of the texts: as many as fit, then the next
  /// batch. Few texts make one smaller batch.
  PackedTexts(const std::vector<ChoiceText>& texts, std::int64_t most_tokens);

  std::int64_t batch_tokens() const noexcept { return tokens_; }  ///< of every batch
  std::int64_t most_documents() const noexcept;  ///< of a batch, with a filler at its end
  const std::vector<TextRange>& batches() const noexcept { return batches_; }
  /// The texts one behind the other, a document each, with labels where they are scored.
  data::Batch batch(const TextRange& range) const;

 private:
  const std::vector<ChoiceText>& texts_;
  std::int64_t tokens_ = 0;
  std::vector<TextRange> batches_;
};

}  // namespace moesaic::apps::eval
