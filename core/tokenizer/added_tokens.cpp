#include "core/tokenizer/added_tokens.h"

#include <algorithm>

#include "core/tokenizer/utf8.h"

namespace moesaic::tokenizer {
namespace {

// Where the character before `at` begins; at > 0.
std::size_t before(std::string_view text, std::size_t at) {
  do {
    --at;
  } while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80);
  return at;
}

std::size_t white_space_before(std::string_view text, std::size_t at) {
  while (at > 0) {
    const std::size_t previous = before(text, at);
    if (!is_white_space(utf8_step(text, previous).code)) break;
    at = previous;
  }
  return at;
}

std::size_t white_space_after(std::string_view text, std::size_t at) {
  while (at < text.size()) {
    const Utf8Step step = utf8_step(text, at);
    if (!is_white_space(step.code)) break;
    at += step.bytes;
  }
  return at;
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)), nodes_(1) {
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    std::uint32_t node = 0;
    for (const char c : tokens_[i].text) {
      const auto byte = static_cast<unsigned char>(c);
      std::uint32_t next = child(node, byte);
      if (next == 0) {
        next = static_cast<std::uint32_t>(nodes_.size());
        auto& list = nodes_[node].next;
        list.insert(std::lower_bound(list.begin(), list.end(), std::pair(byte, std::uint32_t{0})),
                    {byte, next});
        nodes_.emplace_back();
      }
      node = next;
    }
    nodes_[node].token = static_cast<std::int32_t>(i);
    starts_[static_cast<unsigned char>(tokens_[i].text[0])] = true;
    if (tokens_[i].single_word && !word_character_)
      word_character_ = std::make_unique<Regex>(
          "[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\p{Join_Control}]", "single_word");
  }
}

std::uint32_t AddedTokens::child(std::uint32_t node, unsigned char byte) const noexcept {
  const auto& list = nodes_[node].next;
  const auto it = std::lower_bound(list.begin(), list.end(), std::pair(byte, std::uint32_t{0}));
  return it != list.end() && it->first == byte ? it->second : 0;
}

const AddedToken* AddedTokens::longest_at(std::string_view text, std::size_t at) const noexcept {
  const AddedToken* found = nullptr;
  std::uint32_t node = 0;
  for (; at < text.size(); ++at) {
    node = child(node, static_cast<unsigned char>(text[at]));
    if (node == 0) break;
    if (nodes_[node].token >= 0) found = &tokens_[static_cast<std::size_t>(nodes_[node].token)];
  }
  return found;
}

bool AddedTokens::touches_word(std::string_view text, std::size_t begin, std::size_t end) const {
  RegexMatcher matcher(*word_character_);
  const auto is_word = [&](std::size_t at) {
    Match match;
    return matcher.find(text.substr(at, utf8_step(text, at).bytes), 0, match);
  };
  return (begin > 0 && is_word(before(text, begin))) || (end < text.size() && is_word(end));
}

void AddedTokens::split(std::string_view text,
                        bool special,
                        const std::function<void(std::size_t, std::size_t)>& plain,
                        const std::function<void(std::int32_t)>& token) const {
  std::size_t done = 0;  // what was handed out ends here
  for (std::size_t at = 0; at < text.size();) {
    if (!starts_[static_cast<unsigned char>(text[at])]) {
      ++at;
      continue;
    }
    const AddedToken* found = longest_at(text, at);
    if (found == nullptr) {
      ++at;
      continue;
    }
    std::size_t begin = at, end = at + found->text.size();
    at = end;  // also where the match does not count: matches do not overlap
    if (found->special && !special) continue;
    if (found->single_word && touches_word(text, begin, end)) continue;
    if (found->lstrip) begin = std::max(white_space_before(text, begin), done);
    if (found->rstrip) end = white_space_after(text, end);
    if (done < begin) plain(done, begin);
    token(found->id);
    done = end;
  }
  if (done < text.size()) plain(done, text.size());
}

}  // namespace moesaic::tokenizer
