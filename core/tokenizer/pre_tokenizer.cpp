#include "core/tokenizer/pre_tokenizer.h"

namespace moesaic::tokenizer {

const char* const kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// Runs of Han; words with a capitalised or a lower-case end, in other scripts; up to three digits; punctuation; white space.
const char* const kKimiPattern =
    R"([\p{Han}]+)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|\p{N}{1,3})"
    R"(| ?[^\s\p{L}\p{N}]+[\r\n]*)"
    R"(|\s*[\r\n]+)"
    R"(|\s+(?!\S))"
    R"(|\s+)";

PreTokenizer::PreTokenizer(const std::vector<SplitStep>& steps) : steps_(steps) {
  for (const SplitStep& step : steps) {
    matcher_of_step_.push_back(matchers_.size());
    if (step.regex) matchers_.emplace_back(*step.regex);
  }
}

void PreTokenizer::split(std::string_view text, const Word& word) {
  run(0, text, word);
}

void PreTokenizer::run(std::size_t step, std::string_view text, const Word& word) {
  if (text.empty()) return;
  if (step == steps_.size()) return word(text);
  if (!steps_[step].prefix_space || text[0] == ' ') return cut(step, text, word);
  std::string spaced = " ";
  spaced += text;
  cut(step, spaced, word);
}

// Stretches with and without a match alternate as they are found; the behaviour decides which of them stay together.
// `open` is the beginning of a piece that may still grow.
void PreTokenizer::cut(std::size_t step, std::string_view text, const Word& word) {
  const SplitStep& s = steps_[step];
  if (!s.regex) return run(step + 1, text, word);
  const auto piece = [&](std::size_t begin, std::size_t end) {
    run(step + 1, text.substr(begin, end - begin), word);
  };
  std::size_t open = 0;
  bool has_open = false, previous = false;  // previous: was the last stretch a match?
  const auto stretch = [&](std::size_t begin, std::size_t end, bool is_match) {
    switch (s.behavior) {
      case SplitBehavior::isolated:
        piece(begin, end);
        break;
      case SplitBehavior::removed:
        if (!is_match) piece(begin, end);
        break;
      case SplitBehavior::contiguous:
        if (has_open && is_match != previous) piece(open, begin);
        if (!has_open || is_match != previous) open = begin;
        has_open = true;
        break;
      case SplitBehavior::merged_with_previous:
        if (!has_open) open = begin;
        if (has_open && (!is_match || previous)) {
          piece(open, begin);
          open = begin;
        }
        has_open = true;
        break;
      case SplitBehavior::merged_with_next:
        if (!has_open) open = begin;
        if (has_open && (is_match || !previous)) {
          piece(open, begin);
          open = begin;
        }
        has_open = true;
        break;
    }
    previous = is_match;
  };
  RegexMatcher& matcher = matchers_[matcher_of_step_[step]];
  std::size_t at = 0;
  for (Match match; at < text.size() && matcher.find(text, at, match); at = match.end) {
    if (match.begin > at) stretch(at, match.begin, s.invert);
    stretch(match.begin, match.end, !s.invert);
  }
  if (at < text.size()) stretch(at, text.size(), s.invert);
  if (has_open) piece(open, text.size());
}

}  // namespace moesaic::tokenizer
