#include "core/tokenizer/utf8.h"

#include <cstring>

namespace moesaic::tokenizer {
namespace {

unsigned char byte_at(std::string_view text, std::size_t at) noexcept {
  return static_cast<unsigned char>(text[at]);
}

// What may follow a lead byte: how many bytes, and the range of the first of them.
struct Lead {
  std::size_t following = 0;  // 0 = not a lead byte
  unsigned char low = 0x80, high = 0xBF;
};
Lead lead_of(unsigned char c) noexcept {
  if (c >= 0xC2 && c <= 0xDF) return {1};
  if (c == 0xE0) return {2, 0xA0, 0xBF};
  if (c == 0xED) return {2, 0x80, 0x9F};  // surrogates are left out
  if (c >= 0xE1 && c <= 0xEF) return {2};
  if (c == 0xF0) return {3, 0x90, 0xBF};
  if (c >= 0xF1 && c <= 0xF3) return {3};
  if (c == 0xF4) return {3, 0x80, 0x8F};
  return {};
}

std::size_t ascii_run(std::string_view text, std::size_t at) noexcept {
  const std::size_t begin = at;
  for (std::uint64_t word; at + sizeof word <= text.size(); at += sizeof word) {
    std::memcpy(&word, text.data() + at, sizeof word);
    if ((word & 0x8080808080808080ULL) != 0) break;
  }
  while (at < text.size() && byte_at(text, at) < 0x80)
    ++at;
  return at - begin;
}

}  // namespace

Utf8Step utf8_step(std::string_view text, std::size_t at) noexcept {
  const unsigned char first = byte_at(text, at);
  if (first < 0x80) return {1, true, false, first};
  const Lead lead = lead_of(first);
  if (lead.following == 0) return {1, false, false, 0};
  std::uint32_t code = first & (0x3FU >> lead.following);
  for (std::size_t i = 1; i <= lead.following; ++i) {
    if (at + i == text.size()) return {i, false, true, 0};
    const unsigned char c = byte_at(text, at + i);
    if (c < (i == 1 ? lead.low : 0x80) || c > (i == 1 ? lead.high : 0xBF))
      return {i, false, false, 0};
    code = code << 6 | (c & 0x3FU);
  }
  return {lead.following + 1, true, false, code};
}

std::size_t valid_utf8_prefix(std::string_view text) noexcept {
  std::size_t at = 0;
  while (at < text.size()) {
    at += ascii_run(text, at);
    if (at == text.size()) break;
    const Utf8Step step = utf8_step(text, at);
    if (!step.valid) break;
    at += step.bytes;
  }
  return at;
}

std::string replace_invalid_utf8(std::string_view text, std::int64_t& replaced) {
  std::string out;
  out.reserve(text.size() + 16);
  while (!text.empty()) {
    const std::size_t valid = valid_utf8_prefix(text);
    out.append(text.substr(0, valid));
    text.remove_prefix(valid);
    if (text.empty()) break;
    text.remove_prefix(utf8_step(text, 0).bytes);
    out.append(kReplacement);
    ++replaced;
  }
  return out;
}

void append_utf8(std::string& out, std::uint32_t code) {
  const auto put = [&out](std::uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | code >> 6);
    put(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    put(0xE0 | code >> 12);
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  } else {
    put(0xF0 | code >> 18);
    put(0x80 | (code >> 12 & 0x3F));
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  }
}

bool is_ascii(std::string_view text) noexcept {
  return ascii_run(text, 0) == text.size();
}

bool is_white_space(std::uint32_t c) noexcept {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

}  // namespace moesaic::tokenizer
