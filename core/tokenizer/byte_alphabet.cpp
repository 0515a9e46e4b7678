#include "core/tokenizer/byte_alphabet.h"

#include <array>

#include "core/tokenizer/utf8.h"

namespace moesaic::tokenizer {
namespace {

constexpr bool stands_for_itself(std::uint32_t byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

constexpr std::uint32_t kCharacters = 0x144;

struct Tables {
  std::array<std::uint32_t, 256> character{};
  std::array<std::int16_t, kCharacters> byte{};
};
constexpr Tables make_tables() {
  Tables t;
  for (auto& b : t.byte)
    b = -1;
  std::uint32_t next = 0x100;
  for (std::uint32_t b = 0; b < 256; ++b) {
    t.character[b] = stands_for_itself(b) ? b : next++;
    t.byte[t.character[b]] = static_cast<std::int16_t>(b);
  }
  return t;
}
constexpr Tables kTables = make_tables();

}  // namespace

std::uint32_t character_of_byte(unsigned char byte) noexcept {
  return kTables.character[byte];
}

std::optional<std::string> bytes_of_token(std::string_view token) {
  std::string bytes;
  for (std::size_t at = 0; at < token.size();) {
    const Utf8Step step = utf8_step(token, at);
    if (!step.valid || step.code >= kCharacters || kTables.byte[step.code] < 0) return {};
    bytes.push_back(static_cast<char>(kTables.byte[step.code]));
    at += step.bytes;
  }
  return bytes;
}

}  // namespace moesaic::tokenizer
