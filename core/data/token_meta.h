#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace moesaic::data {

/// What PREFIX.meta.json says about a token file; written by MegatronWriter, read where it is present.
struct TokenMeta {
  std::string tokenizer;                    ///< its name; empty = not known
  std::string tokenizer_hash;               ///< of its files; empty = not known
  std::int64_t vocab_size = 0;              ///< ids are below; 0 = not known
  std::optional<std::int64_t> end_of_text;  ///< the id that closes documents, if one does
  std::int64_t documents = 0, tokens = 0;
  std::uint64_t bin_bytes = 0, idx_bytes = 0;
  std::uint32_t bin_crc32c = 0, idx_crc32c = 0;
};

/// The text of a meta.json file. `name` goes into messages. Throws InputError for what is no such object.
TokenMeta parse_token_meta(std::string_view text, const std::string& name);
std::string to_json(const TokenMeta& meta);

}  // namespace moesaic::data
