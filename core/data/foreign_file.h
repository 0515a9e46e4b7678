#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace moesaic::data {

/// What a file that is not of the expected format seems to be, from its first bytes, and what to do about it: "a Git LFS
/// pointer, not the data; fetch it with 'git lfs pull'". Empty when nothing is recognised.
std::string looks_like(std::span<const std::byte> bytes);

/// Throws InputError "file:offset: message".
[[noreturn]] void bad_file(const std::string& file,
                           std::uint64_t offset,
                           const std::string& message);

/// Up to 16 bytes as text where printable, else in hexadecimal: for messages.
std::string shown_bytes(std::span<const std::byte> bytes);

}  // namespace moesaic::data
