#include "core/data/token_meta.h"

#include <limits>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "core/base/json_value.h"

namespace moesaic::data {
namespace {

constexpr JsonLimits kLimits{.max_bytes = std::size_t{64} << 10, .max_depth = 4};
constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();

std::string text_or_empty(const JsonNode& meta, const char* key) {
  const JsonNode node = meta.member_or_null(key);
  return node.is_null() ? "" : node.text();
}

TokenMeta read_meta(const JsonNode& meta) {
  TokenMeta m;
  m.tokenizer = text_or_empty(meta, "tokenizer");
  m.tokenizer_hash = text_or_empty(meta, "tokenizer_hash");
  m.vocab_size = meta.member("vocab_size").integer(0, INT32_MAX);
  const JsonNode end = meta.member_or_null("end_of_text");
  if (!end.is_null()) m.end_of_text = end.integer(0, INT32_MAX);
  m.documents = meta.member("documents").integer(0, kAny);
  m.tokens = meta.member("tokens").integer(0, kAny);
  const auto file = [&](const char* key, std::uint64_t& bytes, std::uint32_t& crc) {
    const JsonNode entry = meta.member(key);
    bytes = static_cast<std::uint64_t>(entry.member("bytes").integer(0, kAny));
    crc = static_cast<std::uint32_t>(entry.member("crc32c").integer(0, UINT32_MAX));
  };
  file("bin", m.bin_bytes, m.bin_crc32c);
  file("idx", m.idx_bytes, m.idx_crc32c);
  return m;
}

}  // namespace

TokenMeta parse_token_meta(std::string_view text, const std::string& name) {
  try {
    const JsonValue value = parse_json(text, name, kLimits);
    return read_meta(JsonNode(value, name));
  } catch (const InputError& error) {
    throw InputError(fmt::format(
        "{} (not a description of a token file; remove it or write the data anew)", error.what()));
  }
}

std::string to_json(const TokenMeta& m) {
  nlohmann::ordered_json json = {{"tokenizer", m.tokenizer},
                                 {"tokenizer_hash", m.tokenizer_hash},
                                 {"vocab_size", m.vocab_size},
                                 {"end_of_text", nullptr},
                                 {"documents", m.documents},
                                 {"tokens", m.tokens},
                                 {"bin", {{"bytes", m.bin_bytes}, {"crc32c", m.bin_crc32c}}},
                                 {"idx", {{"bytes", m.idx_bytes}, {"crc32c", m.idx_crc32c}}}};
  if (m.end_of_text) json["end_of_text"] = *m.end_of_text;
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace moesaic::data
