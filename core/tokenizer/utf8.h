#pragma once
// UTF-8 as Unicode 15, section 3.9, table 3-7 defines it: no surrogates, nothing above U+10FFFF, no overlong forms.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace moesaic::tokenizer {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

struct Utf8Step {
  std::size_t bytes =
      0;  ///< of the character, or of the maximal subpart of an ill-formed one (at least 1)
  bool valid = false;
  bool cut_short = false;  ///< invalid only because the text ends
  std::uint32_t code = 0;  ///< code point, where valid
};

/// The character at text[at]; at < text.size().
Utf8Step utf8_step(std::string_view text, std::size_t at) noexcept;

/// Bytes before the first ill-formed sequence; text.size() when there is none.
std::size_t valid_utf8_prefix(std::string_view text) noexcept;

/// Copies `text` with U+FFFD for every maximal ill-formed subpart, and counts them in `replaced`.
std::string replace_invalid_utf8(std::string_view text, std::int64_t& replaced);

void append_utf8(std::string& out, std::uint32_t code);

bool is_ascii(std::string_view text) noexcept;

/// Unicode property White_Space.
bool is_white_space(std::uint32_t code) noexcept;

}  // namespace moesaic::tokenizer
