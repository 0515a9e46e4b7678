// Texts, any bytes, through two small tokenizers. decode(encode(x)) is x, with U+FFFD where x is no UTF-8.
#include <fstream>
#include <iterator>

#include <nlohmann/json.hpp>

#include "core/tokenizer/tokenizer.h"
#include "core/tokenizer/utf8.h"
#include "tests/fuzz/fuzz.h"

using namespace moesaic;

namespace {

std::string content_of(const std::string& name) {
  std::ifstream file(MOESAIC_SOURCE_DIR "/tests/tokenizer/files/" + name, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// The file of the tokenizer tests, without what changes a text on purpose: NFC, and added tokens that swallow spaces.
std::shared_ptr<const tokenizer::Tokenizer> from_json() {
  auto json = nlohmann::ordered_json::parse(content_of("tokenizer.json"));
  json["normalizer"] = nullptr;
  for (auto& token : json["added_tokens"])
    token["lstrip"] = token["rstrip"] = false;
  return tokenizer::parse_tokenizer_json(json.dump(), "", "a/tokenizer.json");
}

void check(const tokenizer::Tokenizer& tokenizer, std::string_view input, bool parse_special) {
  const auto ids = tokenizer.encode(input, {.parse_special = parse_special});
  std::int64_t replaced = 0;
  const std::string expected = tokenizer::replace_invalid_utf8(input, replaced);
  fuzz::require(tokenizer.decode(ids) == expected, "decode(encode(text)) is the text");
  std::string stream;
  tokenizer::StreamDecoder decoder(tokenizer);
  for (const auto id : ids)
    stream += decoder.push(id);
  stream += decoder.finish();
  fuzz::require(stream == expected, "token by token the text is the same");
}

}  // namespace

MOESAIC_FUZZ_TARGET(bpe_encode) {
  static const auto json = from_json();
  static const auto ranks =
      tokenizer::open_tokenizer(MOESAIC_SOURCE_DIR "/tests/tokenizer/files/ranks");
  for (const bool parse_special : {true, false}) {
    check(*json, input, parse_special);
    check(*ranks, input, parse_special);
  }
}
