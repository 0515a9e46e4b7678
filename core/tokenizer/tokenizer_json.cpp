// tokenizer.json of the Hugging Face tokenizers library: what byte-level BPE families use of it. Everything else is
// refused by its JSON path.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/base/json_value.h"
#include "core/tokenizer/bpe_tokenizer.h"
#include "core/tokenizer/byte_alphabet.h"
#include "core/tokenizer/regex_syntax.h"
#include "core/tokenizer/unicode.h"
#include "core/tokenizer/utf8.h"

namespace moesaic::tokenizer {
namespace {

using Ids = std::unordered_map<std::string_view, std::int32_t>;  // tokens as the file spells them

void must_be_null(const JsonNode& node, const char* why) {
  if (!node.is_null()) node.fail(fmt::format("must be null: {}", why));
}

void read_normalizer(const JsonNode& node, BpeParts& parts) {
  if (node.is_null()) return;
  const std::string type = node.member("type").text();
  if (type == "NFC") {
    node.only({"type"});
    parts.nfc = true;
  } else if (type == "Sequence") {
    node.only({"type", "normalizers"});
    const JsonNode list = node.member("normalizers");
    for (std::size_t i = 0; i < list.list().size(); ++i)
      read_normalizer(list.item(i), parts);
  } else {
    node.member("type").fail(
        fmt::format("the normalizer {} is not implemented; NFC and Sequence are", type));
  }
}

SplitBehavior behavior_of(const JsonNode& node) {
  const std::string& name = node.text();
  if (name == "Removed") return SplitBehavior::removed;
  if (name == "Isolated") return SplitBehavior::isolated;
  if (name == "MergedWithPrevious") return SplitBehavior::merged_with_previous;
  if (name == "MergedWithNext") return SplitBehavior::merged_with_next;
  if (name == "Contiguous") return SplitBehavior::contiguous;
  node.fail(
      fmt::format("{} is not known; Removed, Isolated, MergedWithPrevious, MergedWithNext and "
                  "Contiguous are",
                  name));
}

std::shared_ptr<const Regex> compile(const std::string& pattern, const std::string& where) {
  return std::make_shared<Regex>(to_pcre2(pattern, RegexDialect::oniguruma, where), where);
}

SplitStep read_split(const JsonNode& node) {
  node.only({"type", "pattern", "behavior", "invert"});
  const JsonNode pattern = node.member("pattern");
  pattern.only({"Regex", "String"});
  if (pattern.object().items.size() != 1) pattern.fail("must hold either Regex or String");
  SplitStep step;
  const JsonNode regex = pattern.member_or_null("Regex");
  if (!regex.is_null()) {
    step.regex = compile(regex.text(), regex.where());
  } else {
    const JsonNode text = pattern.member("String");
    if (text.text().empty()) text.fail("is empty");
    step.regex = std::make_shared<Regex>(quote_for_pcre2(text.text()), text.where());
  }
  step.behavior = behavior_of(node.member("behavior"));
  step.invert = node.boolean_or("invert", false);
  return step;
}

SplitStep read_byte_level(const JsonNode& node) {
  node.only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
  node.boolean_or("trim_offsets", true);  // concerns offsets, which nobody asks for
  SplitStep step;
  step.prefix_space = node.member("add_prefix_space").boolean();
  if (node.boolean_or("use_regex", true)) step.regex = compile(kGpt2Pattern, node.where());
  return step;
}

// Returns whether the last step made the text byte-level.
bool read_pre_tokenizer(const JsonNode& node, BpeParts& parts, bool byte_level) {
  if (node.is_null()) return byte_level;
  if (byte_level) node.fail("a step after ByteLevel is not implemented");
  const std::string type = node.member("type").text();
  if (type == "Sequence") {
    node.only({"type", "pretokenizers"});
    const JsonNode list = node.member("pretokenizers");
    for (std::size_t i = 0; i < list.list().size(); ++i)
      byte_level = read_pre_tokenizer(list.item(i), parts, byte_level);
    return byte_level;
  }
  if (type == "Split") {
    parts.steps.push_back(read_split(node));
  } else if (type == "Digits") {
    node.only({"type", "individual_digits"});
    const bool single = node.boolean_or("individual_digits", false);
    parts.steps.push_back(
        {.regex = compile("\\p{N}", node.where()),
         .behavior = single ? SplitBehavior::isolated : SplitBehavior::contiguous});
  } else if (type == "ByteLevel") {
    parts.steps.push_back(read_byte_level(node));
    return true;
  } else {
    node.member("type").fail(fmt::format(
        "the pre-tokenizer {} is not implemented; Sequence, Split, Digits and ByteLevel are",
        type));
  }
  return false;
}

void read_decoder(const JsonNode& node) {
  if (node.is_null()) node.fail("must be ByteLevel: only byte-level BPE is implemented");
  const std::string type = node.member("type").text();
  if (type == "Sequence") {
    node.only({"type", "decoders"});
    const JsonNode list = node.member("decoders");
    if (list.list().size() != 1) list.fail("must hold ByteLevel and nothing else");
    return read_decoder(list.item(0));
  }
  if (type != "ByteLevel")
    node.member("type").fail(
        fmt::format("the decoder {} is not implemented; ByteLevel is (byte-level BPE)", type));
  node.only({"type", "add_prefix_space", "trim_offsets", "use_regex"});  // of no effect on decoding
}

std::int32_t id_of(const JsonNode& node) {
  return static_cast<std::int32_t>(node.integer(0, kMaxId));
}

constexpr std::size_t kMostTemplateIds = 1024;  // those of real files add one or two

// Template pieces: {"SpecialToken": {"id", "type_id"}} or {"Sequence": {"id": "A", "type_id"}}.
void read_template(const JsonNode& node, BpeParts& parts) {
  node.only({"type", "single", "pair", "special_tokens"});
  node.member("pair").list();  // pairs of texts are never encoded
  const JsonNode special = node.member("special_tokens"), single = node.member("single");
  std::vector<std::int32_t> before, after;
  bool seen = false;
  for (std::size_t i = 0; i < single.list().size(); ++i) {
    const JsonNode piece = single.item(i);
    piece.only({"SpecialToken", "Sequence"});
    const JsonNode sequence = piece.member_or_null("Sequence");
    if (!sequence.is_null()) {
      sequence.only({"id", "type_id"});
      if (seen || sequence.member("id").text() != "A") sequence.fail("must be A, once");
      seen = true;
      continue;
    }
    const JsonNode token = piece.member("SpecialToken");
    token.only({"id", "type_id"});
    const JsonNode ids = special.member(token.member("id").text()).member("ids");
    for (std::size_t k = 0; k < ids.list().size(); ++k) {
      (seen ? after : before).push_back(id_of(ids.item(k)));
      if (before.size() + after.size() + parts.before.size() + parts.after.size() >
          kMostTemplateIds)
        node.fail(fmt::format("adds more than {} tokens to every text", kMostTemplateIds));
    }
  }
  if (!seen) single.fail("does not hold the text (Sequence A)");
  parts.before.insert(parts.before.begin(), before.begin(), before.end());
  parts.after.insert(parts.after.end(), after.begin(), after.end());
}

void read_post_processor(const JsonNode& node, BpeParts& parts) {
  if (node.is_null()) return;
  const std::string type = node.member("type").text();
  if (type == "Sequence") {
    node.only({"type", "processors"});
    const JsonNode list = node.member("processors");
    for (std::size_t i = 0; i < list.list().size(); ++i)
      read_post_processor(list.item(i), parts);
  } else if (type == "ByteLevel") {  // concerns offsets alone
    node.only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
  } else if (type == "TemplateProcessing") {
    read_template(node, parts);
  } else {
    node.member("type").fail(fmt::format(
        "the post-processor {} is not implemented; TemplateProcessing, ByteLevel and Sequence are",
        type));
  }
}

Ids read_vocabulary(const JsonNode& node, BpeModel& model) {
  const JsonValue& vocab = node.object();
  Ids ids;
  std::int64_t most = -1;
  ids.reserve(vocab.keys.size());
  for (std::size_t i = 0; i < vocab.keys.size(); ++i) {
    const auto& item = vocab.items[i];
    if (item.kind != JsonValue::Kind::integer || item.integer < 0 || item.integer > kMaxId)
      node.fail(fmt::format("\"{}\" has no id of 0 to {}", vocab.keys[i], kMaxId));
    if (vocab.keys[i].empty()) node.fail("holds an empty token");
    most = std::max(most, item.integer);
    ids.emplace(vocab.keys[i], static_cast<std::int32_t>(item.integer));
  }
  require_few_gaps(most, vocab.keys.size(), node.where());
  model.tokens.resize(static_cast<std::size_t>(most + 1));
  for (std::size_t i = 0; i < vocab.keys.size(); ++i) {
    std::string& token = model.tokens[static_cast<std::size_t>(vocab.items[i].integer)];
    if (!token.empty())
      node.fail(fmt::format(
          "\"{}\" has the id {} of another token", vocab.keys[i], vocab.items[i].integer));
    // Tokens outside the alphabet (special ones, as a rule) are never the result of merges.
    token = bytes_of_token(vocab.keys[i]).value_or(vocab.keys[i]);
  }
  for (int byte = 0; byte < 256; ++byte) {
    std::string character;
    append_utf8(character, character_of_byte(static_cast<unsigned char>(byte)));
    const auto found = ids.find(character);
    if (found == ids.end())
      node.fail(
          fmt::format("holds no token \"{}\" for the byte {:#04x}; only vocabularies with all "
                      "256 bytes are implemented (byte-level BPE)",
                      character,
                      byte));
    model.byte_ids[static_cast<std::size_t>(byte)] = found->second;
  }
  return ids;
}

// "a b" or ["a", "b"].
std::pair<std::string_view, std::string_view> read_merge(const JsonNode& list, std::size_t i) {
  const JsonValue& item = list.value().items[i];
  if (item.kind == JsonValue::Kind::text) {
    const std::string_view text = item.text;
    const auto space = text.find(' ');
    if (space == std::string_view::npos || text.find(' ', space + 1) != std::string_view::npos)
      list.item(i).fail(fmt::format("\"{}\" is not two tokens with a space between", text));
    return {text.substr(0, space), text.substr(space + 1)};
  }
  if (item.kind != JsonValue::Kind::list || item.items.size() != 2 ||
      item.items[0].kind != JsonValue::Kind::text || item.items[1].kind != JsonValue::Kind::text)
    list.item(i).fail("is neither \"a b\" nor [\"a\", \"b\"]");
  return {item.items[0].text, item.items[1].text};
}

void read_merges(const JsonNode& list, const Ids& ids, BpeModel& model) {
  const std::size_t count = list.list().size();
  model.merges.reserve(count);
  const auto id = [&](std::string_view token, std::size_t i) {
    const auto found = ids.find(token);
    if (found == ids.end()) list.item(i).fail(fmt::format("\"{}\" is not in model.vocab", token));
    return found->second;
  };
  for (std::size_t i = 0; i < count; ++i) {
    const auto [left, right] = read_merge(list, i);
    const std::string merged = std::string(left) + std::string(right);
    if (!model.merges.insert({.left = id(left, i),
                              .right = id(right, i),
                              .rank = static_cast<std::int32_t>(i),
                              .merged = id(merged, i)}))
      list.item(i).fail("this merge occurs twice");
  }
}

Ids read_model(const JsonNode& node, BpeParts& parts) {
  node.only({"type",
             "dropout",
             "unk_token",
             "continuing_subword_prefix",
             "end_of_word_suffix",
             "fuse_unk",
             "byte_fallback",
             "ignore_merges",
             "vocab",
             "merges"});
  const JsonNode type = node.member("type");
  if (type.text() != "BPE")
    type.fail(fmt::format("the model {} is not implemented; BPE (byte-level) is", type.text()));
  must_be_null(node.member_or_null("dropout"), "random merges are not implemented");
  for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const JsonNode text = node.member_or_null(affix);
    if (!text.is_null() && !text.text().empty())
      text.fail("must be null or empty: not implemented");
  }
  if (node.boolean_or("byte_fallback", false))
    node.member("byte_fallback").fail("must be false: only byte-level BPE is implemented");
  node.boolean_or("fuse_unk", false);  // nothing is unknown where all bytes are tokens
  parts.model.whole_words_first = node.boolean_or("ignore_merges", false);
  Ids ids = read_vocabulary(node.member("vocab"), parts.model);
  const JsonNode unknown = node.member_or_null("unk_token");
  if (!unknown.is_null() && ids.count(unknown.text()) == 0)
    unknown.fail(fmt::format("\"{}\" is not in model.vocab", unknown.text()));
  read_merges(node.member("merges"), ids, parts.model);
  if (!parts.model.whole_words_first) return ids;
  for (const auto& [text, id] : ids) {
    if (bytes_of_token(text))
      parts.model.words.emplace(parts.model.tokens[static_cast<std::size_t>(id)], id);
  }
  return ids;
}

void read_added_tokens(const JsonNode& list, const Ids& vocabulary, BpeParts& parts) {
  if (list.is_null()) return;
  std::unordered_map<std::int32_t, std::string_view> spelled;
  for (const auto& [text, id] : vocabulary)
    spelled.emplace(id, text);
  std::unordered_set<std::string> texts;
  std::unordered_set<std::int32_t> ids;
  for (std::size_t i = 0; i < list.list().size(); ++i) {
    const JsonNode node = list.item(i);
    node.only({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
    AddedToken token{.text = node.member("content").text(),
                     .id = id_of(node.member("id")),
                     .special = node.member("special").boolean(),
                     .single_word = node.member("single_word").boolean(),
                     .lstrip = node.member("lstrip").boolean(),
                     .rstrip = node.member("rstrip").boolean(),
                     .normalized = node.member("normalized").boolean()};
    if (token.text.empty()) node.member("content").fail("is empty");
    if (!texts.insert(token.text).second)
      node.member("content").fail(fmt::format("\"{}\" occurs twice", token.text));
    if (!ids.insert(token.id).second)
      node.member("id").fail(fmt::format("{} occurs twice", token.id));
    const auto in_vocab = vocabulary.find(token.text);
    const auto same_id = spelled.find(token.id);
    if (in_vocab != vocabulary.end() && in_vocab->second != token.id)
      node.member("id").fail(
          fmt::format("is {}, but model.vocab has {}", token.id, in_vocab->second));
    if (same_id != spelled.end() && same_id->second != token.text)
      node.member("id").fail(
          fmt::format("{} is the id of \"{}\" in model.vocab", token.id, same_id->second));
    parts.added.push_back(std::move(token));
  }
}

}  // namespace

std::shared_ptr<const Tokenizer> parse_tokenizer_json(std::string_view json,
                                                      std::string_view config,
                                                      const std::string& file) {
  require_unicode_libraries();
  const JsonValue value = parse_json(json, file);
  const JsonNode root(value, file);
  root.only({"version",
             "truncation",
             "padding",
             "added_tokens",
             "normalizer",
             "pre_tokenizer",
             "post_processor",
             "decoder",
             "model"});
  if (const JsonNode version = root.member("version"); version.text() != "1.0")
    version.fail(fmt::format("is \"{}\"; only 1.0 is known", version.text()));
  must_be_null(root.member_or_null("truncation"), "texts are never cut short");
  must_be_null(root.member_or_null("padding"), "texts are never padded");
  BpeParts parts;
  parts.name = short_name(file);
  parts.content_hash = content_hash_of(json);
  read_normalizer(root.member_or_null("normalizer"), parts);
  const JsonNode pre = root.member_or_null("pre_tokenizer");
  if (!read_pre_tokenizer(pre, parts, false))
    pre.fail("must end with ByteLevel: only byte-level BPE is implemented");
  read_post_processor(root.member_or_null("post_processor"), parts);
  read_decoder(root.member_or_null("decoder"));
  const Ids vocabulary = read_model(root.member("model"), parts);
  read_added_tokens(root.member_or_null("added_tokens"), vocabulary, parts);
  parts.end_of_text = find_end_of_text(parts.added, config, file);
  return make_bpe_tokenizer(std::move(parts));
}

}  // namespace moesaic::tokenizer
