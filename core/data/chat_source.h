#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/data/token_source.h"

namespace moesaic::data {

/// How text becomes tokens.
struct TextEncoder {
  /// Throws InputError for text that it cannot take; the message need not say where.
  std::function<std::vector<std::int32_t>(std::string_view)> encode;
  std::int32_t end_of_text = kEndOfText;
};
/// A token per byte, without the byte 0.
TextEncoder byte_encoder();

/// Opens a JSONL file of conversations (chat_record.h), a record a line; empty lines are passed over. A record is a
/// document: its text, and the end-of-text token, which is a target where the last piece is. Pieces are encoded one by one,
/// so no token lies across the border of a target. Documents stay whole. The file is read once; tokens are kept in memory (4
/// bytes each, and 1 for the target). Throws InputError "file:offset: line N: …".
std::unique_ptr<TokenSource> open_chat(const std::string& path,
                                       std::int64_t vocab_size,
                                       const TextEncoder& encoder);

}  // namespace moesaic::data
