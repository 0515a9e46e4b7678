#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace moesaic::data {

/// How a file holds token ids: little-endian integers, at any alignment.
enum class TokenType : std::uint8_t { u8, i8, u16, i16, i32, u32, i64 };

std::size_t byte_size(TokenType type) noexcept;
const char* name(TokenType type) noexcept;  ///< "u16"
/// The type of a name; nothing for another text.
std::optional<TokenType> token_type_of(const std::string& name);

/// A token id that is not allowed, and its place among those looked at.
struct BadToken {
  std::size_t index = 0;
  std::int64_t value = 0;
};

/// Reads out.size() tokens from `bytes` (that many times byte_size(type) bytes). Returns the first id outside
/// [0, vocab_size), if any; `out` is then not complete. 1 <= vocab_size < 2^31.
std::optional<BadToken> decode_tokens(TokenType type,
                                      const std::byte* bytes,
                                      std::int64_t vocab_size,
                                      std::span<std::int32_t> out);

/// The first of `count` tokens whose id is outside [0, vocab_size), if any.
std::optional<BadToken> find_bad_token(TokenType type,
                                       const std::byte* bytes,
                                       std::size_t count,
                                       std::int64_t vocab_size);

/// Appends the places behind each token with this id: where documents end that it closes. Ids are not checked.
void find_ends(TokenType type,
               const std::byte* bytes,
               std::size_t count,
               std::int64_t id,
               std::vector<std::int64_t>& ends);

}  // namespace moesaic::data
