#include "core/data/token_type.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/base/activity.h"
#include "core/base/error.h"

namespace moesaic::data {
namespace {

constexpr std::array<const char*, 7> kNames{"u8", "i8", "u16", "i16", "i32", "u32", "i64"};

template <class T>
T at(const std::byte* bytes, std::size_t i) {
  T value;
  std::memcpy(&value, bytes + i * sizeof(T), sizeof(T));
  return value;
}

template <class F>
auto with_type(TokenType type, F&& f) {
  switch (type) {
    case TokenType::u8:
      return f(std::uint8_t{});
    case TokenType::i8:
      return f(std::int8_t{});
    case TokenType::u16:
      return f(std::uint16_t{});
    case TokenType::i16:
      return f(std::int16_t{});
    case TokenType::i32:
      return f(std::int32_t{});
    case TokenType::u32:
      return f(std::uint32_t{});
    case TokenType::i64:
      break;
  }
  return f(std::int64_t{});
}

// Blocks without a branch per token, so that the loop is vectorised; the place is looked for only where a block has one.
template <class T>
std::optional<BadToken> decode(const std::byte* bytes,
                               std::int64_t vocab_size,
                               std::size_t count,
                               std::int32_t* out) {
  constexpr std::size_t kBlock = 4096;
  const auto limit = static_cast<std::uint64_t>(vocab_size);
  const auto is_bad = [&](std::size_t i) {
    return static_cast<std::uint64_t>(static_cast<std::int64_t>(at<T>(bytes, i))) >= limit;
  };
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t end = std::min(count, begin + kBlock);
    count_progress();
    unsigned bad = 0;
    for (std::size_t i = begin; i < end; ++i)
      bad |= is_bad(i) ? 1U : 0U;
    if (bad != 0) {
      std::size_t i = begin;
      while (!is_bad(i))
        ++i;
      return BadToken{i, static_cast<std::int64_t>(at<T>(bytes, i))};
    }
    if (out == nullptr) continue;
    for (std::size_t i = begin; i < end; ++i)
      out[i] = static_cast<std::int32_t>(at<T>(bytes, i));
  }
  return std::nullopt;
}

std::optional<BadToken> decode(TokenType type,
                               const std::byte* bytes,
                               std::int64_t vocab_size,
                               std::size_t count,
                               std::int32_t* out) {
  MOESAIC_CHECK(1 <= vocab_size && vocab_size <= INT32_MAX, "no such vocabulary");
  return with_type(
      type, [&](auto zero) { return decode<decltype(zero)>(bytes, vocab_size, count, out); });
}

}  // namespace

std::size_t byte_size(TokenType type) noexcept {
  return with_type(type, [](auto zero) { return sizeof(zero); });
}

const char* name(TokenType type) noexcept {
  return kNames[static_cast<std::size_t>(type)];
}

std::optional<TokenType> token_type_of(const std::string& text) {
  const auto it = std::find(kNames.begin(), kNames.end(), text);
  if (it == kNames.end()) return std::nullopt;
  return static_cast<TokenType>(it - kNames.begin());
}

std::optional<BadToken> decode_tokens(TokenType type,
                                      const std::byte* bytes,
                                      std::int64_t vocab_size,
                                      std::span<std::int32_t> out) {
  return decode(type, bytes, vocab_size, out.size(), out.data());
}

std::optional<BadToken> find_bad_token(TokenType type,
                                       const std::byte* bytes,
                                       std::size_t count,
                                       std::int64_t vocab_size) {
  return decode(type, bytes, vocab_size, count, nullptr);
}

void find_ends(TokenType type,
               const std::byte* bytes,
               std::size_t count,
               std::int64_t id,
               std::vector<std::int64_t>& ends) {
  with_type(type, [&](auto zero) {
    for (std::size_t i = 0; i < count; ++i) {
      if (static_cast<std::int64_t>(at<decltype(zero)>(bytes, i)) == id)
        ends.push_back(static_cast<std::int64_t>(i) + 1);
    }
  });
}

}  // namespace moesaic::data
