#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/tokenizer/unicode.h"

namespace moesaic::tokenizer {

struct AddedToken {
  std::string text;
  std::int32_t id = 0;
  bool special = false;
  bool single_word = false;  ///< only where no letter, mark, digit or '_' touches it
  bool lstrip = false;       ///< takes the white space before it along
  bool rstrip = false;       ///< … after it
  bool normalized = false;   ///< looked for after normalisation
};

/// A set of texts that are searched for all at once: leftmost first, the longest where several start. A byte trie,
/// entered only at bytes that start one of them, so ordinary text costs one look per byte.
class AddedTokens {
 public:
  explicit AddedTokens(std::vector<AddedToken> tokens);

  /// Cuts `text` (valid UTF-8) into tokens and what lies between. Calls plain(begin, end) for non-empty stretches and
  /// token(id), in order. `special`: whether special tokens count.
  void split(std::string_view text,
             bool special,
             const std::function<void(std::size_t, std::size_t)>& plain,
             const std::function<void(std::int32_t)>& token) const;
  bool empty() const noexcept { return tokens_.empty(); }

 private:
  struct Node {
    std::vector<std::pair<unsigned char, std::uint32_t>> next;  // sorted by byte
    std::int32_t token = -1;                                    // index into tokens_
  };
  std::uint32_t child(std::uint32_t node, unsigned char byte) const noexcept;
  const AddedToken* longest_at(std::string_view text, std::size_t at) const noexcept;
  bool touches_word(std::string_view text, std::size_t begin, std::size_t end) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_;
  std::array<bool, 256> starts_{};
  std::unique_ptr<Regex> word_character_;  // only where a token is single_word
};

}  // namespace moesaic::tokenizer
