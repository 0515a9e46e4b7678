#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "core/data/token_type.h"

namespace moesaic::data {

/// What the header of a token file of llm.c says: 256 little-endian i32. [0] magic, [1] version, [2] tokens. GPT-2:
/// 20240520, version 1, u16 tokens follow; Llama 3: 20240801, version 7, u32.
struct LlmcHeader {
  TokenType type = TokenType::u16;
  std::int64_t num_tokens = 0;
  std::int64_t end_of_text = 0;  ///< that llm.c's own scripts put between documents

  static constexpr std::size_t kBytes = 1024;
};

/// Whether the file starts with a magic number of llm.c, of whatever kind.
bool has_llmc_magic(std::span<const std::byte> file);
/// Throws InputError (file:offset, found, allowed) unless header and file size agree.
LlmcHeader parse_llmc_header(std::span<const std::byte> file, const std::string& name);

}  // namespace moesaic::data
