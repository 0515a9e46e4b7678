#pragma once
#include <cstddef>
#include <cstdint>

namespace moesaic {

/// CRC-32C (Castagnoli, reflected polynomial 0x82f63b78, start and final xor ~0) of `bytes` bytes.
/// `crc` is the checksum of what came before, so that crc32c(b, n, crc32c(a, m)) is that of a
/// followed by b; 0 at the start. Uses the CRC32 instruction of SSE4.2 where the build allows it.
/// Source: RFC 3720, appendix B.4.
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t crc = 0) noexcept;

/// The same by a table, on any processor.
std::uint32_t crc32c_by_table(const void* data, std::size_t bytes, std::uint32_t crc = 0) noexcept;

}  // namespace moesaic
