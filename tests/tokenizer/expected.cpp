// The small tokenizers of tests/tokenizer/files against what the Python packages made of the same bytes
// (tests/oracles/make_tiny_files.py), and what they say of broken files.
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/tokenizer/tokenizer.h"
#include "tests/support/catch.h"
#include "tests/tokenizer/support.h"

namespace moesaic::tokenizer {
namespace {

std::string from_hex(const std::string& hex) {
  std::string bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2)
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}

int compare(const Tokenizer& tokenizer, const std::string& expected) {
  std::istringstream lines(test_file(expected));
  const auto encoder = tokenizer.encoder();
  int compared = 0;
  for (std::string line; std::getline(lines, line); ++compared) {
    const auto entry = nlohmann::json::parse(line);
    std::vector<std::int32_t> ids;
    encoder->encode(from_hex(entry["bytes"]), ids);
    INFO(line);
    CHECK(ids == entry["ids"].get<std::vector<std::int32_t>>());
  }
  return compared;
}

const std::string kJson = test_file("tokenizer.json");
const std::string kRanks = test_file("ranks/tiktoken.model");
const std::string kConfig = test_file("ranks/tokenizer_config.json");

std::shared_ptr<const Tokenizer> tiny(const std::string& json = kJson) {
  return parse_tokenizer_json(json, "", "folder/tokenizer.json");
}
std::shared_ptr<const Tokenizer> tiny_ranks(const std::string& ranks = kRanks,
                                            const std::string& config = kConfig) {
  return parse_rank_file(ranks, config, "folder/tiktoken.model");
}
std::string json_refusal(const std::string& from, const std::string& to) {
  return refusal([&] { tiny(with(kJson, from, to)); });
}

TEST_CASE("tokenizer.json: the ids of the tokenizers package", "[tokenizer]") {
  if (!has_unicode_libraries()) return;
  const auto tokenizer = tiny();
  CHECK(compare(*tokenizer, "tokenizer_json.expected") == 28);
  CHECK(tokenizer->vocab_size() == 343);
  CHECK(tokenizer->end_of_text() == 341);
  CHECK(tokenizer->find("<|im_start|>") == 342);
  CHECK(tokenizer->name() == "folder/tokenizer.json");
  CHECK(tokenizer->content_hash().rfind("crc32c:", 0) == 0);
}

TEST_CASE("rank file: the ids of the tiktoken package", "[tokenizer]") {
  if (!has_unicode_libraries()) return;
  const auto tokenizer = tiny_ranks();
  CHECK(compare(*tokenizer, "ranks.expected") == 28);
  CHECK(tokenizer->vocab_size() == 344);
  CHECK(tokenizer->end_of_text() == 341);
}

TEST_CASE("decode gives the bytes back; special tokens on request only", "[tokenizer]") {
  if (!has_unicode_libraries()) return;
  const std::string text = "the thing<|endoftext|> 中文 \n\x01";
  for (const auto& tokenizer : {tiny(), tiny_ranks()}) {
    const auto ids = tokenizer->encode(text);
    CHECK(tokenizer->decode(ids) == text);
    CHECK(tokenizer->decode(ids, true) == with(text, "<|endoftext|>", ""));
    const auto as_text = tokenizer->encode(text, {.parse_special = false});
    CHECK(as_text.size() > ids.size());
    CHECK(tokenizer->decode(as_text, true) == text);
    CHECK(contains(refusal([&] { tokenizer->decode(std::vector<std::int32_t>{5000}); }), "5000"));
    CHECK(contains(refusal([&] { tokenizer->decode(std::vector<std::int32_t>{-1}); }), "-1"));
  }
}

TEST_CASE("invalid UTF-8 becomes U+FFFD and is counted", "[tokenizer]") {
  if (!has_unicode_libraries()) return;
  const auto tokenizer = tiny();
  const auto encoder = tokenizer->encoder();
  std::vector<std::int32_t> ids;
  encoder->encode("a\xFF\xE4\xB8", ids);
  CHECK(encoder->replaced() == 2);
  CHECK(tokenizer->decode(ids) == "a\uFFFD\uFFFD");
}

TEST_CASE("the post-processor acts on request", "[tokenizer]") {
  if (!has_unicode_libraries()) return;
  const auto tokenizer = tiny(with(kJson, "\"post_processor\": null", R"("post_processor": {
    "type": "Sequence", "processors": [
      {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true},
      {"type": "TemplateProcessing",
       "single": [{"SpecialToken": {"id": "b", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                  {"SpecialToken": {"id": "e", "type_id": 0}}],
       "pair": [], "special_tokens": {"b": {"id": "b", "ids": [342], "tokens": ["b"]},
                                      "e": {"id": "e", "ids": [341, 341], "tokens": ["e", "e"]}}}]})"));
  const auto plain = tokenizer->encode("the");
  auto wrapped = tokenizer->encode("the", {.add_special = true});
  REQUIRE(wrapped.size() == plain.size() + 3);
  CHECK(wrapped.front() == 342);
  CHECK(wrapped[wrapped.size() - 2] == 341);
  // A short file must not be able to add very many tokens: each piece names a list that may be long itself.
  std::string pieces, ids = "341";
  for (int i = 0; i < 40; ++i) {
    pieces += R"({"SpecialToken": {"id": "e", "type_id": 0}}, )";
    ids += ", 341";
  }
  CHECK(contains(refusal([&] {
                   tiny(with(kJson,
                             "\"post_processor\": null",
                             R"("post_processor": {
    "type": "TemplateProcessing", "single": [)" +
                                 pieces + R"({"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [], "special_tokens": {"e": {"id": "e", "ids": [)" +
                                 ids + R"(], "tokens": ["e"]}}})"));
                 }),
                 "post_processor: adds more than 1024 tokens to every text"));
}

TEST_CASE("tokenizer.json: what is not implemented is refused by its JSON path", "[tokenizer]") {
  if (!has_unicode_libraries()) return;
  struct Case {
    const char *from, *to, *says;
  };
  const Case cases[] = {
      {"\"truncation\": null", "\"truncation\": {\"max_length\": 5}", "truncation: must be null"},
      {"\"padding\": null", "\"padding\": {}", "padding: must be null"},
      {"\"padding\": null,", "\"padding\": null, \"extra\": 1,", "extra: this member is not known"},
      {"\"version\": \"1.0\"", "\"version\": \"2.0\"", "version: is \"2.0\""},
      {"\"type\": \"NFC\"", "\"type\": \"NFKC\"", "normalizer.type: the normalizer NFKC"},
      {"\"type\": \"Split\"",
       "\"type\": \"Metaspace\"",
       "pre_tokenizer.pretokenizers[0].type: the pre-tokenizer Metaspace"},
      {"\"behavior\": \"Isolated\"",
       "\"behavior\": \"Odd\"",
       "pre_tokenizer.pretokenizers[0].behavior: Odd is not known"},
      {"\"type\": \"BPE\"", "\"type\": \"Unigram\"", "model.type: the model Unigram"},
      {"\"dropout\": null", "\"dropout\": 0.1", "model.dropout: must be null"},
      {"\"byte_fallback\": false", "\"byte_fallback\": true", "model.byte_fallback: must be false"},
      {"\"end_of_word_suffix\": null",
       "\"end_of_word_suffix\": \"</w>\"",
       "model.end_of_word_suffix"},
      {"\"unk_token\": null", "\"unk_token\": \"<unk>\"", "model.unk_token: \"<unk>\" is not in"},
      {"\"ignore_merges\": false", "\"ignore_merges\": 0", "model.ignore_merges: is an integer"},
      {"\"id\": 341", "\"id\": 340", "added_tokens[1].id: 340 occurs twice"},
      {"\"id\": 341", "\"id\": 7", "added_tokens[1].id: 7 is the id of"},
      {"\"id\": 341", "\"id\": 99999999", "added_tokens[1].id: is 99999999, must be 0 to"},
      {"\"id\": 341", "\"id\": \"341\"", "added_tokens[1].id: is a string"},
      {"\"content\": \"<|im_start|>\"",
       "\"content\": \"[PAD]\"",
       "added_tokens[2].content: \"[PAD]\" occurs twice"},
      {"\"content\": \"<|im_start|>\"", "\"content\": \"\"", "added_tokens[2].content: is empty"},
      {"\"t h\"", "\"t h h\"", "model.merges["},
      {"\"t h\"", "[\"t\", \"nowhere\"]", "\"nowhere\" is not in model.vocab"},
      {"\"t h\"", "\"e r\"", "this merge occurs twice"},
      {"\"!\": 0", "\"!!\": 0", "holds no token \"!\" for the byte 0x21"},
      {"\"!\": 0", "\"!\": 1", "has the id 1 of another token"},
      {"\"!\": 0", "\"!\": 4194303", "model.vocab: the largest id is 4194303"},
      {"\"!\": 0", "\"!\": 0, \"!\": 0", "the key \"!\" is given twice"},
      {"\"version\": \"1.0\"", "\"version\": 1e999", "not valid JSON"},
  };
  for (const Case& c : cases) {
    const std::string said = json_refusal(c.from, c.to);
    INFO(c.to << "\n" << said);
    CHECK(contains(said, "folder/tokenizer.json"));
    CHECK(contains(said, c.says));
  }
  CHECK(contains(refusal([] { tiny("[1, 2"); }), "folder/tokenizer.json:"));
  CHECK(contains(refusal([] { tiny(std::string(100000, '[')); }), "nested more than 64"));
  CHECK(contains(refusal([] { tiny("{}"); }), "has no member \"version\""));
  for (std::size_t cut = 0; cut < kJson.size(); cut += 97)  // a file cut short anywhere
    CHECK_FALSE(refusal([&] { tiny(kJson.substr(0, cut)); }).empty());
}

TEST_CASE("the end of a document: tokenizer_config.json, else the usual names", "[tokenizer]") {
  if (!has_unicode_libraries()) return;
  const auto end = [](const std::string& config, const std::string& json = kJson) {
    return parse_tokenizer_json(json, config, "tokenizer.json")->end_of_text();
  };
  CHECK(end(R"({"eos_token": "<|im_start|>", "model_max_length": 1e30})") == 342);
  CHECK(end(R"({"eos_token": {"content": "[PAD]"}})") == 340);
  CHECK(end(R"({"eos_token": null})") == 341);
  CHECK(contains(refusal([&] { end(R"({"eos_token": "nope"})"); }),
                 "tokenizer_config.json: eos_token: \"nope\" is not among"));
  CHECK_FALSE(end("", with(kJson, "\"<|im_start|>\"", "\"</s>\"")));  // two candidates
  CHECK_FALSE(end("", with(kJson, "\"<|endoftext|>\"", "\"<|other|>\"")));
}

TEST_CASE("rank files: errors name the line, or the path in the configuration", "[tokenizer]") {
  if (!has_unicode_libraries()) return;
  const auto says = [](const std::string& ranks, const std::string& config = kConfig) {
    return refusal([&] { tiny_ranks(ranks, config); });
  };
  CHECK(says(kRanks + "\n\r\n").empty());
  CHECK(contains(says(kRanks + "IQ== 1\n"), "tiktoken.model:341: the rank 1 occurs twice"));
  CHECK(contains(says(kRanks + "IQ== 345\n"), ":341: this token occurs twice"));
  CHECK(contains(says(kRanks + "IV9f 4194303\n"),
                 "tiktoken.model: the largest id is 4194303, but there are 341 tokens"));
  CHECK(contains(says(kRanks + "IR== 345\n"), ":341: \"IR==\" is not the base64"));
  CHECK(contains(says(kRanks + "I!== 345\n"), "is not the base64"));
  CHECK(contains(says(kRanks + "AAAA\n"), "must be a base64 token, a space and a rank"));
  CHECK(contains(says(kRanks + "AAAA x\n"), "the rank \"x\""));
  CHECK(contains(says(kRanks + "AAAA 99999999\n"), "the rank \"99999999\""));
  CHECK(contains(says(kRanks.substr(0, kRanks.find('\n', 100) + 1)),
                 "holds no token for the byte 0x00"));
  CHECK(contains(says(kRanks, ""), "needs a folder/tokenizer_config.json"));
  CHECK(contains(says(kRanks, "{}"), "pat_str: is missing"));
  CHECK(contains(says(kRanks, with(kConfig, "\"341\"", "\"17\"")),
                 "added_tokens_decoder.17: this id is taken"));
  CHECK(contains(says(kRanks, with(kConfig, "\"341\"", "\"x\"")), "the key \"x\" is no id"));
  CHECK(contains(
      says(kRanks, with(kConfig, "TikTokenTokenizer\"", "x\", \"pat_str\": \"a|(?<n>b)\"")),
      "pat_str: this kind of group is not implemented"));
}

}  // namespace
}  // namespace moesaic::tokenizer
