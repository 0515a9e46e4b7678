#pragma once
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/tokenizer/unicode.h"

namespace moesaic::tokenizer {

/// What becomes of the matches of a pattern (names as in tokenizer.json).
enum class SplitBehavior { removed, isolated, merged_with_previous, merged_with_next, contiguous };

/// One step of pre-tokenization: cuts a text at the matches of a pattern.
struct SplitStep {
  std::shared_ptr<const Regex> regex;  ///< null = the text stays whole
  SplitBehavior behavior = SplitBehavior::isolated;
  bool invert = false;        ///< matches and what lies between change places
  bool prefix_space = false;  ///< first puts a space before a text that does not begin with one
};

/// Cuts text into the words that byte-pair encoding works on, step by step: each step works on the pieces of the one
/// before, which see nothing of each other. Holds the working memory of one thread. Must not outlive the steps.
class PreTokenizer {
 public:
  explicit PreTokenizer(const std::vector<SplitStep>& steps);
  /// Calls word(piece) for every non-empty piece, in order.
  void split(std::string_view text, const std::function<void(std::string_view)>& word);

 private:
  using Word = std::function<void(std::string_view)>;
  void run(std::size_t step, std::string_view text, const Word& word);
  void cut(std::size_t step, std::string_view text, const Word& word);
  const std::vector<SplitStep>& steps_;
  std::vector<RegexMatcher> matchers_;  // one per step with a pattern
  std::vector<std::size_t> matcher_of_step_;
};

/// The pattern of GPT-2, which ByteLevel with use_regex means.
extern const char* const kGpt2Pattern;
/// The pattern of Kimi's tokenizer.
extern const char* const kKimiPattern;

}  // namespace moesaic::tokenizer
