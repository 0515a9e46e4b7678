// The parts of the tokenizers by themselves.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "core/tokenizer/added_tokens.h"
#include "core/tokenizer/bpe.h"
#include "core/tokenizer/byte_alphabet.h"
#include "core/tokenizer/pre_tokenizer.h"
#include "core/tokenizer/regex_syntax.h"
#include "core/tokenizer/tokenizer.h"
#include "core/tokenizer/utf8.h"
#include "tests/support/catch.h"
#include "tests/tokenizer/support.h"

namespace moesaic::tokenizer {
namespace {

TEST_CASE("UTF-8: maximal subparts, as the Unicode standard's table 3-8 and 3-11", "[tokenizer]") {
  const auto repaired = [](std::string_view text) {
    std::int64_t count = 0;
    std::string out = replace_invalid_utf8(text, count), marks;
    for (std::size_t at = 0; (at = out.find(kReplacement, at)) != std::string::npos;)
      out.replace(at, 3, "?");
    CHECK(std::count(out.begin(), out.end(), '?') == count);
    return out;
  };
  CHECK(repaired("plain \xC3\xA9 \xF0\x9F\x91\x8D") == "plain \xC3\xA9 \xF0\x9F\x91\x8D");
  CHECK(repaired("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41") == "????????A");
  CHECK(repaired("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41") == "????????A");
  CHECK(repaired("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42") == "?????A??B");
  CHECK(repaired("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41") == "????A");
}

class Spelling final : public Tokenizer {  // token i is the byte i
 public:
  std::unique_ptr<Encoder> encoder(const EncodeOptions&) const override { return nullptr; }
  std::string decode(std::span<const std::int32_t> ids, bool) const override {
    std::string text;
    for (const auto id : ids)
      text.push_back(static_cast<char>(id));
    return text;
  }
  std::int64_t vocab_size() const noexcept override { return 256; }
  const std::vector<NamedToken>& named_tokens() const noexcept override { return named_; }
  std::optional<std::int32_t> end_of_text() const noexcept override { return {}; }
  const std::string& name() const noexcept override { return name_; }
  const std::string& content_hash() const noexcept override { return name_; }

 private:
  std::vector<NamedToken> named_;
  std::string name_;
};

TEST_CASE("a stream of tokens never shows half a character", "[tokenizer]") {
  const Spelling tokenizer;
  StreamDecoder decoder(tokenizer);
  std::vector<std::string> shown;
  for (const unsigned char byte : std::string("a\xF0\x9F\x91\x8D\xC3z\xFF\xE4\xB8"))
    shown.push_back(decoder.push(byte));
  CHECK(shown == std::vector<std::string>{
                     "a", "", "", "", "\xF0\x9F\x91\x8D", "", "\uFFFDz", "\uFFFD", "", ""});
  CHECK(decoder.finish() == "\uFFFD");
  CHECK(decoder.finish().empty());
}

TEST_CASE("the byte alphabet is a bijection", "[tokenizer]") {
  for (int byte = 0; byte < 256; ++byte) {
    std::string token;
    append_utf8(token, character_of_byte(static_cast<unsigned char>(byte)));
    CHECK(bytes_of_token(token) == std::string(1, static_cast<char>(byte)));
  }
  CHECK(bytes_of_token("Ġthe") == " the");
  CHECK_FALSE(bytes_of_token("a b"));
  CHECK_FALSE(bytes_of_token("中"));
}

TEST_CASE("patterns are rewritten where engines differ, or refused", "[tokenizer]") {
  const auto ruby = [](const std::string& p) {
    return to_pcre2(p, RegexDialect::oniguruma, "here");
  };
  const auto rust = [](const std::string& p) { return to_pcre2(p, RegexDialect::rust, "here"); };
  CHECK(ruby(R"(\s+(?!\S)|[^\s\p{L}])") ==
        R"(\p{White_Space}+(?!\P{White_Space})|[^\p{White_Space}\p{L}])");
  CHECK(ruby(R"([\p{Han}\u3040-\u309f])") == R"([\p{sc:Han}\x{3040}-\x{309f}])");
  CHECK(ruby(R"((?i:'s|'ll)|(a|b)?)") == R"((?i:'s|'ll)|(?:a|b)?)");
  CHECK(rust(R"([\p{L}\p{M}\p{N}\p{P}\p{S}\p{Z}&&[^\p{Han}x]]+)") ==
        R"([^\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{sc:Han}x]+)");
  CHECK(rust(R"(a++$)") == R"(a++\z)");
  CHECK(rust(R"(\p{N}{1,3}+)") == R"(\p{N}{1,3}+)");
  struct Case {
    const char *pattern, *says;
  };
  for (const Case& c : {Case{R"(\w+)", R"('\w' is not implemented)"},
                        {R"(\bx)", R"('\b')"},
                        {R"(\h)", R"('\h')"},
                        {R"((a)\1)", R"('\1')"},
                        {"^a", "start of a line"},
                        {"a$", "end of a line"},
                        {"a{1,2}+", "'}+' means something of its own"},
                        {"a{2}?", "'}?' means"},
                        {"a{,2}", "an interval must be"},
                        {"a{x", "an interval must be"},
                        {"a**", "a quantifier after a quantifier"},
                        {"*a", "has nothing to repeat"},
                        {"(a", "a group is not closed"},
                        {"a)", "')' without '('"},
                        {"[a", "a set is not closed"},
                        {"[]a]", "an empty set"},
                        {"[a[b]]", "a set inside a set"},
                        {"[[:alpha:]]", "a set inside a set"},
                        {"[a&&[^b]]", "'&&' is implemented between general categories"},
                        {"[\\p{L}&&[b]]", "'&&' is implemented between general categories"},
                        {"[\\p{L}&&b]", "'&&' is implemented before a negated set"},
                        {"(?<name>a)", "this kind of group"},
                        {"(?x)a", "this kind of group"},
                        {"(*ACCEPT)", "this kind of group"},
                        {"(?i:[a-z])", "a set inside (?i:"},
                        {"(?i:\\p{Lu})", "a property inside (?i:"},
                        {"(?i:é)", "a character outside ASCII inside (?i:"},
                        {"\\p{", "'\\p{' is not closed"},
                        {"\\p{L=x}", "the property 'L=x'"},
                        {"\\", "a backslash at the end"},
                        {"\\x{110000000}", "not a hexadecimal code point"}}) {
    const std::string said = refusal([&] { ruby(c.pattern); });
    INFO(c.pattern << "\n" << said);
    CHECK(contains(said, "here: "));
    CHECK(contains(said, c.says));
  }
}

std::vector<std::string> pieces(const std::string& text, std::vector<SplitStep> steps) {
  std::vector<std::string> out;
  PreTokenizer(steps).split(text, [&](std::string_view piece) { out.emplace_back(piece); });
  return out;
}
SplitStep split_at(const std::string& pattern, SplitBehavior behavior, bool invert = false) {
  return {
      .regex = std::make_shared<Regex>(pattern, "test"), .behavior = behavior, .invert = invert};
}

TEST_CASE("what becomes of matches: the five behaviours", "[tokenizer]") {
  if (!has_unicode_libraries()) return;
  using List = std::vector<std::string>;
  const auto cut =
      [](SplitBehavior behavior, bool invert = false, const char* text = "the-final--countdown") {
        return pieces(text, {split_at("-", behavior, invert)});
      };
  CHECK(cut(SplitBehavior::removed) == List{"the", "final", "countdown"});
  CHECK(cut(SplitBehavior::isolated) == List{"the", "-", "final", "-", "-", "countdown"});
  CHECK(cut(SplitBehavior::merged_with_previous) == List{"the-", "final-", "-", "countdown"});
  CHECK(cut(SplitBehavior::merged_with_next) == List{"the", "-final", "-", "-countdown"});
  CHECK(cut(SplitBehavior::contiguous) == List{"the", "-", "final", "--", "countdown"});
  CHECK(cut(SplitBehavior::removed, true) == List{"-", "-", "-"});
  CHECK(cut(SplitBehavior::merged_with_previous, false, "--a-") == List{"-", "-", "a-"});
  CHECK(cut(SplitBehavior::merged_with_next, false, "a--") == List{"a", "-", "-"});
  CHECK(cut(SplitBehavior::isolated, false, "") == List{});
  CHECK(pieces("a-b", {split_at("-", SplitBehavior::isolated), {.prefix_space = true}}) ==
        List{" a", " -", " b"});
}

TEST_CASE("a pattern that backtracks without end gives up with a message", "[tokenizer]") {
  if (!has_unicode_libraries()) return;
  const std::string said = refusal([] {
    pieces(std::string(60, 'a') + "!", {split_at("(?:a|aa)+(?:a|aa)+$", SplitBehavior::isolated)});
  });
  CHECK(contains(said, "test: PCRE2 gave up on a text of 61 bytes"));
  CHECK(
      contains(refusal([] { Regex("a*", "here"); }), "here: the pattern can match the empty text"));
  CHECK(contains(refusal([] { Regex("a(", "here"); }), "here: the pattern is refused by PCRE2"));
}

TEST_CASE("added tokens: longest first, white space and word limits", "[tokenizer]") {
  if (!has_unicode_libraries()) return;
  const AddedTokens tokens({{.text = "<a>", .id = 1, .special = true},
                            {.text = "<a>b", .id = 2},
                            {.text = "<s>", .id = 3, .lstrip = true, .rstrip = true},
                            {.text = "TAG", .id = 4, .single_word = true}});
  const auto split = [&](const std::string& text, bool special = true) {
    std::string out;
    tokens.split(
        text,
        special,
        [&](std::size_t begin, std::size_t end) {
          out += "[" + text.substr(begin, end - begin) + "]";
        },
        [&](std::int32_t id) { out += std::to_string(id); });
    return out;
  };
  CHECK(split("") == "");
  CHECK(split("x<a>y") == "[x]1[y]");
  CHECK(split("<a>b<a><a") == "21[<a]");
  CHECK(split("<a>b<a>c", false) == "2[<a>c]");
  CHECK(split("x \xC2\xA0<s>\n y") == "[x]3[y]");
  CHECK(split("<s> <s>") == "33");
  CHECK(split("TAG TAGs _TAG éTAG TAG.") == "4[ TAGs _TAG éTAG ]4[.]");
}

// Lowest rank first, leftmost of equals: word for word.
std::vector<std::int32_t> merged_slowly(const BpeModel& model, std::string_view word) {
  std::vector<std::int32_t> ids;
  for (const unsigned char c : word)
    ids.push_back(model.byte_ids[c]);
  for (;;) {
    const PairTable::Entry* best = nullptr;
    std::size_t where = 0;
    for (std::size_t i = 0; i + 1 < ids.size(); ++i) {
      const auto* merge = model.merges.find(ids[i], ids[i + 1]);
      if (merge != nullptr && (best == nullptr || merge->rank < best->rank)) {
        best = merge;
        where = i;
      }
    }
    if (best == nullptr) return ids;
    ids[where] = best->merged;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(where) + 1);
  }
}

TEST_CASE("merges of short and long words are those of the definition", "[tokenizer]") {
  BpeModel model;
  std::uint64_t state = 7;
  const auto draw = [&](std::uint64_t below) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<std::int32_t>((state >> 33) % below);
  };
  for (int b = 0; b < 256; ++b) {
    model.byte_ids[static_cast<std::size_t>(b)] = 255 - b;
    model.tokens.emplace_back(1, static_cast<char>(255 - b));
  }
  const std::vector<std::int32_t> used{255 - 'a', 255 - 'b', 255 - 'c'};
  std::vector<std::int32_t> ids = used;
  for (int i = 0; i < 60; ++i) {
    const auto left = ids[static_cast<std::size_t>(draw(ids.size()))],
               right = ids[static_cast<std::size_t>(draw(ids.size()))];
    const auto merged = static_cast<std::int32_t>(model.tokens.size());
    // Ranks in an order of their own, so that a later token may be merged before an earlier one.
    if (!model.merges.insert({.left = left, .right = right, .rank = i * 37 % 61, .merged = merged}))
      continue;
    model.tokens.push_back(model.tokens[static_cast<std::size_t>(left)] +
                           model.tokens[static_cast<std::size_t>(right)]);
    ids.push_back(merged);
  }
  BpeMerger merger(model);
  for (int i = 0; i < 600; ++i) {
    std::string word;
    for (int n = draw(i < 300 ? 45 : 200); n > 0; --n)
      word.push_back(static_cast<char>('a' + draw(3)));
    for (int again = 0; again < 2; ++again) {  // the second time from the cache, where it is short
      std::vector<std::int32_t> out;
      merger.encode(word, out);
      REQUIRE(out == merged_slowly(model, word));
    }
  }
}

TEST_CASE("bytes: the byte is the id, zero is the end", "[tokenizer]") {
  const auto tokenizer = open_tokenizer("bytes");
  CHECK(tokenizer->encode("a\xFF") == std::vector<std::int32_t>{97, 255});
  CHECK(tokenizer->decode(std::vector<std::int32_t>{97, 0, 255}, true) == "a\xFF");
  CHECK(tokenizer->end_of_text() == 0);
  CHECK(contains(refusal([&] { tokenizer->encode(std::string("a\0b", 3)); }), "offset 1"));
  if (has_unicode_libraries())
    CHECK(
        contains(refusal([] { open_tokenizer("/nowhere/tokenizer.json"); }), "no such tokenizer"));
  else
    CHECK_THROWS_AS(open_tokenizer("/nowhere/tokenizer.json"), UsageError);
}

}  // namespace
}  // namespace moesaic::tokenizer
