#include "apps/eval/choice_set.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "core/base/durable_file.h"
#include "core/base/error.h"
#include "core/data/choice_record.h"
#include "core/data/foreign_file.h"
#include "core/data/token_source.h"

namespace moesaic::apps::eval {
namespace {

std::size_t common_prefix(const std::vector<std::int32_t>& a, const std::vector<std::int32_t>& b) {
  const std::size_t most = std::min(a.size(), b.size());
  return static_cast<std::size_t>(
      std::mismatch(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(most), b.begin()).first -
      a.begin());
}

}  // namespace

ChoiceSet::ChoiceSet(std::string name,
                     std::string path,
                     const tokenizer::Tokenizer& tokenizer,
                     std::int64_t window)
    : name_(std::move(name)), path_(std::move(path)), window_(window) {
  const MappedFile file(path_, MappedFile::Links::follow);
  const std::string kind = data::looks_like({file.data(), file.size()});
  if (!kind.empty() && kind != "a text file")
    data::bad_file(path_, 0, "not a JSONL file: this is " + kind);
  const auto encoder = tokenizer.encoder();
  const std::string_view text = file.text();
  std::int64_t line = 1;
  for (std::size_t at = 0; at < text.size(); ++line) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view record = text.substr(at, end - at);
    if (record.find_first_not_of(" \t\r") != std::string_view::npos) add(record, line, *encoder);
    at = end + 1;
  }
  if (questions_.empty()) throw InputError(fmt::format("{}: no records", path_));
}

std::int64_t ChoiceSet::num_cut() const noexcept {
  return std::count_if(questions_.begin(), questions_.end(), [](const auto& q) { return q.cut; });
}
std::int64_t ChoiceSet::num_without_context() const noexcept {
  return std::count_if(
      questions_.begin(), questions_.end(), [](const auto& q) { return q.no_context; });
}

void ChoiceSet::add(std::string_view record, std::int64_t line, tokenizer::Encoder& encoder) {
  const std::string where = fmt::format("{}:{}", path_, line);
  const data::ChoiceRecord r = data::parse_choice_record(record, where);
  Question question{
      .line = line, .answer = r.answer, .first = texts_.size(), .count = r.choices.size()};
  const auto encode = [&](const std::string& text) {
    std::vector<std::int32_t> tokens;
    try {
      encoder.encode(text, tokens);
    } catch (const InputError& error) {
      throw InputError(fmt::format("{}: {}", where, error.what()));
    }
    return tokens;
  };
  const std::vector<std::int32_t> context = encode(r.context);
  for (std::size_t i = 0; i < r.choices.size(); ++i) {
    const std::string& choice = r.choices[i];
    texts_.push_back(text_of(
        context, encode(r.context + choice), fmt::format("{}: choice {}", where, i), question));
    texts_.back().bytes = static_cast<std::int64_t>(choice.size());
  }
  questions_.push_back(question);
}

ChoiceText ChoiceSet::text_of(const std::vector<std::int32_t>& context,
                              std::vector<std::int32_t> whole,
                              const std::string& where,
                              Question& question) const {
  const std::size_t shared = common_prefix(context, whole);
  const std::size_t first = std::max<std::size_t>(shared, 1);
  if (whole.size() <= first)
    throw InputError(fmt::format("{}: {}",
                                 where,
                                 shared == 0 ? "one token with nothing before it, so there is "
                                               "nothing to predict; give a longer context"
                                             : "adds no token to the context"));
  ChoiceText text;
  const auto most = static_cast<std::size_t>(window_) + 1;
  const std::size_t left_out = whole.size() > most ? whole.size() - most : 0;
  if (left_out >= first)
    throw InputError(
        fmt::format("{}: {} tokens, of which the model can predict {} at once; use "
                    "shorter choices or data.sequence_length={}",
                    where,
                    whole.size() - first,
                    window_,
                    whole.size() - first));
  question.cut = question.cut || left_out > 0;
  question.no_context = question.no_context || shared == 0;
  text.first_scored = static_cast<std::int64_t>(first - left_out);
  whole.erase(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(left_out));
  text.tokens = std::move(whole);
  return text;
}

PackedTexts::PackedTexts(const std::vector<ChoiceText>& texts, std::int64_t most_tokens)
    : texts_(texts) {
  constexpr std::int64_t kGranule = 64;
  std::int64_t all = 0, used = 0;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const std::int64_t length = texts[i].length();
    MOESAIC_CHECK(length >= 1 && length <= most_tokens, "a text that fits no batch");
    if (batches_.empty() || used + length > most_tokens) {
      batches_.push_back({i, i});
      used = 0;
    }
    batches_.back().last = i + 1;
    used += length;
    all += length;
  }
  tokens_ = std::min(most_tokens, (all + kGranule - 1) / kGranule * kGranule);
}

std::int64_t PackedTexts::most_documents() const noexcept {
  std::size_t most = 0;
  for (const TextRange& range : batches_)
    most = std::max(most, range.last - range.first);
  return static_cast<std::int64_t>(most) + 1;
}

data::Batch PackedTexts::batch(const TextRange& range) const {
  data::Batch batch = data::make_batch(tokens_, 1);
  batch.num_samples = 1;
  for (std::size_t i = range.first; i < range.last; ++i) {
    const ChoiceText& text = texts_[i];
    for (std::int64_t t = 0; t < text.length(); ++t) {
      const auto at = static_cast<std::size_t>(t);
      const bool is_scored = t + 1 >= text.first_scored;
      batch.tokens.push_back(text.tokens[at]);
      batch.labels.push_back(is_scored ? text.tokens[at + 1] : data::kIgnoredLabel);
      batch.positions.push_back(static_cast<std::int32_t>(t));
      batch.valid_labels += is_scored ? 1 : 0;
    }
    batch.cu.push_back(static_cast<std::int32_t>(batch.tokens.size()));
  }
  data::append_filler(batch, tokens_ - static_cast<std::int64_t>(batch.tokens.size()));
  return batch;
}

}  // namespace moesaic::apps::eval
