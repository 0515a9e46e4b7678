#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace moesaic::tokenizer {

/// The alphabet of byte-level vocabularies: one printable character per byte, so that tokens are text in a JSON file.
/// Bytes 0x21-0x7E, 0xA1-0xAC and 0xAE-0xFF are the characters of these code points; the other 68, in order, are
/// U+0100 to U+0143. Source: the vocabulary files of GPT-2 and its descendants.
std::uint32_t character_of_byte(unsigned char byte) noexcept;

/// The bytes that a token of such a vocabulary stands for; nothing if it holds a character outside the alphabet.
std::optional<std::string> bytes_of_token(std::string_view token);

}  // namespace moesaic::tokenizer
