#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "core/data/token_source.h"
#include "core/tokenizer/tokenizer.h"

namespace moesaic::data {

/// Opens a JSONL file of conversations (chat_record.h), a record a line; empty lines are passed over. A record is a
/// document: its text, and the tokenizer's end-of-text token, if it has one, which is a target where the last piece is. Pieces are encoded one by one,
/// so no token lies across the border of a target. Documents stay whole. The file is read once; tokens are kept in memory (4
/// bytes each, and 1 for the target). Throws InputError "file:offset: line N: …".
std::unique_ptr<TokenSource> open_chat(const std::string& path,
                                       std::int64_t vocab_size,
                                       const tokenizer::Tokenizer& tokenizer);

}  // namespace moesaic::data
