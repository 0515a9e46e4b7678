// Rank files as tiktoken reads them: a line per token, base64 of its bytes and its rank, which is its id.
#include <algorithm>
#include <array>
#include <charconv>
#include <unordered_set>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/base/json_value.h"
#include "core/tokenizer/bpe_tokenizer.h"
#include "core/tokenizer/regex_syntax.h"
#include "core/tokenizer/unicode.h"

namespace moesaic::tokenizer {
namespace {

constexpr std::size_t kMaxTokenBytes = 1024;
constexpr const char* kKimiClass = "TikTokenTokenizer";

int base64_value(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  if (c == '+') return 62;
  if (c == '/') return 63;
  return -1;
}

// Base64 with padding (RFC 4648, section 4); nothing where `text` is not.
std::optional<std::string> base64_bytes(std::string_view text) {
  if (text.size() % 4 != 0) return {};
  while (!text.empty() && text.size() % 4 != 2 && text.back() == '=')
    text.remove_suffix(1);
  std::string bytes;
  std::uint32_t bits = 0;
  int held = 0;
  for (const char c : text) {
    const int value = base64_value(c);
    if (value < 0) return {};
    bits = bits << 6 | static_cast<std::uint32_t>(value);
    held += 6;
    if (held < 8) continue;
    held -= 8;
    bytes.push_back(static_cast<char>(bits >> held & 0xFF));
  }
  if ((bits & ((1U << held) - 1)) != 0) return {};  // what padding cuts off must be zero
  return bytes;
}

struct Line {
  std::string token;
  std::int32_t rank = 0;
  std::int64_t number = 0;
};

Line read_line(std::string_view line, const std::string& where) {
  const auto space = line.find(' ');
  if (space == std::string_view::npos)
    throw InputError(fmt::format("{}: must be a base64 token, a space and a rank", where));
  auto token = base64_bytes(line.substr(0, space));
  if (!token || token->empty() || token->size() > kMaxTokenBytes)
    throw InputError(fmt::format("{}: \"{}\" is not the base64 of a token of 1 to {} bytes",
                                 where,
                                 line.substr(0, std::min<std::size_t>(space, 60)),
                                 kMaxTokenBytes));
  const std::string_view number = line.substr(space + 1);
  std::int32_t rank = -1;
  const auto end = std::from_chars(number.data(), number.data() + number.size(), rank);
  if (end.ec != std::errc() || end.ptr != number.data() + number.size() || rank < 0 ||
      rank > kMaxId)
    throw InputError(fmt::format(
        "{}: the rank \"{}\" is no integer of 0 to {}", where, number.substr(0, 30), kMaxId));
  return {std::move(*token), rank};
}

std::vector<Line> read_lines(std::string_view text, const std::string& file) {
  std::vector<Line> lines;
  for (std::int64_t number = 1; !text.empty(); ++number) {
    const auto newline = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, newline);
    text.remove_prefix(std::min(newline + 1, text.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) continue;
    lines.push_back(read_line(line, fmt::format("{}:{}", file, number)));
    lines.back().number = number;
  }
  return lines;
}

void read_ranks(std::string_view text, const std::string& file, BpeModel& model) {
  std::vector<Line> lines = read_lines(text, file);
  std::int64_t largest = -1;
  for (const Line& line : lines)
    largest = std::max<std::int64_t>(largest, line.rank);
  require_few_gaps(largest, lines.size(), file);
  model.tokens.resize(static_cast<std::size_t>(largest + 1));
  std::unordered_set<std::string_view> seen;
  for (Line& line : lines) {
    std::string& token = model.tokens[static_cast<std::size_t>(line.rank)];
    if (!token.empty())
      throw InputError(
          fmt::format("{}:{}: the rank {} occurs twice", file, line.number, line.rank));
    token = std::move(line.token);
    if (!seen.insert(token).second)
      throw InputError(fmt::format("{}:{}: this token occurs twice", file, line.number));
  }
}

// Every way to put a token together from two tokens is a merge, and the token's id its rank.
void make_merges(const std::string& file, BpeModel& model) {
  for (std::size_t id = 0; id < model.tokens.size(); ++id) {
    if (!model.tokens[id].empty())
      model.words.emplace(model.tokens[id], static_cast<std::int32_t>(id));
  }
  for (int byte = 0; byte < 256; ++byte) {
    const char c = static_cast<char>(byte);
    const auto found = model.words.find(std::string_view(&c, 1));
    if (found == model.words.end())
      throw InputError(fmt::format("{}: holds no token for the byte {:#04x}", file, byte));
    model.byte_ids[static_cast<std::size_t>(byte)] = found->second;
  }
  model.merges.reserve(4 * model.words.size());
  for (std::size_t id = 0; id < model.tokens.size(); ++id) {
    const std::string_view token = model.tokens[id];
    for (std::size_t cut = 1; cut < token.size(); ++cut) {
      const auto left = model.words.find(token.substr(0, cut));
      if (left == model.words.end()) continue;
      const auto right = model.words.find(token.substr(cut));
      if (right == model.words.end()) continue;
      model.merges.insert({.left = left->second,
                           .right = right->second,
                           .rank = static_cast<std::int32_t>(id),
                           .merged = static_cast<std::int32_t>(id)});
    }
  }
  model.whole_words_first = true;
}

std::int32_t id_of_key(const JsonNode& list, const std::string& key) {
  std::int32_t id = -1;
  const auto end = std::from_chars(key.data(), key.data() + key.size(), id);
  if (end.ec != std::errc() || end.ptr != key.data() + key.size() || id < 0 || id > kMaxId)
    list.fail(fmt::format("the key \"{}\" is no id of 0 to {}", key, kMaxId));
  return id;
}

void read_special_tokens(const JsonNode& list, BpeParts& parts) {
  if (list.is_null()) return;
  const auto& tokens = parts.model.tokens;
  std::unordered_set<std::string> texts;
  std::unordered_set<std::int32_t> ids;
  for (const std::string& key : list.object().keys) {
    const JsonNode node = list.member(key);
    AddedToken token{.text = node.member("content").text(),
                     .id = id_of_key(list, key),
                     .special = node.boolean_or("special", true)};
    for (const char* flag : {"single_word", "lstrip", "rstrip"}) {
      if (node.boolean_or(flag, false))
        node.member(flag).fail("must be false: not implemented for rank files");
    }
    if (token.text.empty()) node.member("content").fail("is empty");
    const auto id = static_cast<std::size_t>(token.id);
    if ((id < tokens.size() && !tokens[id].empty()) || !ids.insert(token.id).second)
      node.fail("this id is taken by another token");
    if (!texts.insert(token.text).second)
      node.member("content").fail(fmt::format("\"{}\" occurs twice", token.text));
    parts.added.push_back(std::move(token));
  }
}

std::string pattern_of(const JsonNode& config, const std::string& file) {
  const JsonNode own = config.member_or_null("pat_str");
  if (!own.is_null()) return own.text();
  const JsonNode kind = config.member_or_null("tokenizer_class");
  if (!kind.is_null() && kind.text() == kKimiClass) return kKimiPattern;
  config.member_or_null("pat_str").fail(fmt::format(
      "is missing. {} does not hold the pattern that splits words: put it into pat_str, or have "
      "\"tokenizer_class\": \"{}\" for Kimi's",
      file,
      kKimiClass));
}

}  // namespace

std::shared_ptr<const Tokenizer> parse_rank_file(std::string_view ranks,
                                                 std::string_view config,
                                                 const std::string& file) {
  require_unicode_libraries();
  if (config.empty())
    throw InputError(fmt::format(
        "{}: a rank file needs a {} beside it, with added_tokens_decoder (the special tokens) and "
        "pat_str (the pattern), or \"tokenizer_class\": \"{}\"",
        file,
        config_name(file),
        kKimiClass));
  const JsonValue value = parse_json(config, config_name(file));
  const JsonNode root(value, config_name(file));
  BpeParts parts;
  parts.name = short_name(file);
  read_ranks(ranks, file, parts.model);
  make_merges(file, parts.model);
  read_special_tokens(root.member_or_null("added_tokens_decoder"), parts);
  const std::string pattern = pattern_of(root, file);
  const std::string where = root.member_or_null("pat_str").where();
  parts.steps.push_back(
      {.regex = std::make_shared<Regex>(to_pcre2(pattern, RegexDialect::rust, where), where)});
  std::string decides = std::string(ranks) + pattern;
  for (const AddedToken& token : parts.added)
    decides += fmt::format("\n{} {} {}", token.id, token.text, token.special);
  parts.content_hash = content_hash_of(decides);
  parts.end_of_text = find_end_of_text(parts.added, config, file);
  return make_bpe_tokenizer(std::move(parts));
}

}  // namespace moesaic::tokenizer
