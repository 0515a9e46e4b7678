#pragma once
// What a tokenizer that was accepted must be able to do.
#include <memory>

#include "core/tokenizer/tokenizer.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/strict_json.h"

namespace moesaic::fuzz {

/// A file, and behind the first zero byte the tokenizer_config.json beside it.
struct Files {
  explicit Files(std::string_view input) : file(input.substr(0, input.find('\0'))) {
    if (file.size() < input.size()) config = input.substr(file.size() + 1);
  }
  std::string_view file, config;
};

/// Encodes a text of words, numbers, spaces and bytes that are no UTF-8. A pattern may give up on it; ids outside the vocabulary are
/// an error.
inline void use(const tokenizer::Tokenizer& tokenizer, std::string_view config) {
  if (!config.empty()) require_strict_json(config);
  constexpr std::string_view text =
      "Hello  world, 12345!\n\t\xC3\xA9\xE4\xBD\xA0\xF0\x9F\x98\x80 e\xCC\x81 \xFF\xC3<|a|>";
  std::vector<std::int32_t> ids;
  if (!accepts([&] { ids = tokenizer.encode(text); })) return;
  for (const auto id : ids)
    require(0 <= id && id < tokenizer.vocab_size(), "an id is below the size of the vocabulary");
  tokenizer.decode(ids);
  for (const auto& named : tokenizer.named_tokens())
    require(named.id < tokenizer.vocab_size() && tokenizer.find(named.text) == named.id,
            "a named token is found under its name");
}

}  // namespace moesaic::fuzz
