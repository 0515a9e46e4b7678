#include "core/base/crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/base/activity.h"

#ifdef __SSE4_2__
#include <immintrin.h>
#endif

namespace moesaic {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78U;

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t rest = i;
    for (int bit = 0; bit < 8; ++bit)
      rest = (rest >> 1) ^ ((rest & 1U) != 0 ? kPolynomial : 0U);
    table[i] = rest;
  }
  return table;
}
constexpr auto kTable = make_table();

}  // namespace

std::uint32_t crc32c_by_table(const void* data, std::size_t bytes, std::uint32_t crc) noexcept {
  const auto* p = static_cast<const unsigned char*>(data);
  std::uint32_t rest = ~crc;
  for (std::size_t i = 0; i < bytes; ++i)
    rest = (rest >> 8) ^ kTable[(rest ^ p[i]) & 0xffU];
  return ~rest;
}

namespace {
#ifdef __SSE4_2__
std::uint32_t crc32c_of_block(const void* data, std::size_t bytes, std::uint32_t crc) noexcept {
  const auto* p = static_cast<const unsigned char*>(data);
  std::uint64_t rest = ~crc;
  for (; bytes >= 8; bytes -= 8, p += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, p, 8);  // the data need not be aligned
    rest = _mm_crc32_u64(rest, word);
  }
  auto tail = static_cast<std::uint32_t>(rest);
  for (; bytes > 0; --bytes, ++p)
    tail = _mm_crc32_u8(tail, *p);
  return ~tail;
}
#else
std::uint32_t crc32c_of_block(const void* data, std::size_t bytes, std::uint32_t crc) noexcept {
  return crc32c_by_table(data, bytes, crc);
}
#endif
}  // namespace

// Files of many gigabytes pass through here while they are read: each block is a sign of life.
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t crc) noexcept {
  constexpr std::size_t kBlock = std::size_t{4} << 20;
  const auto* p = static_cast<const unsigned char*>(data);
  for (; bytes > kBlock; bytes -= kBlock, p += kBlock) {
    crc = crc32c_of_block(p, kBlock, crc);
    count_progress();
  }
  return crc32c_of_block(p, bytes, crc);
}

}  // namespace moesaic
