#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "core/data/token_source.h"
#include "core/data/token_type.h"

namespace moesaic::data {

/// Token files without a table of documents, mapped. A token `end_of_text` is the last of its document; without that id a
/// file is one document. Its places are looked for when the file is opened (one pass, 8 bytes of memory per document).
/// `vocab_size`: ids must be below, which read() checks. Files must not change while in use. Throw InputError
/// (file:offset).

/// A file of llm.c. Without `end_of_text` it is the one of llm.c's own scripts: 50256 for GPT-2, 128000 for Llama 3.
std::unique_ptr<TokenSource> open_llmc(const std::string& path,
                                       std::int64_t vocab_size,
                                       std::optional<std::int64_t> end_of_text);
/// A file that is tokens of one type and nothing else, as nanoGPT writes them (its meta.pkl is never read).
std::unique_ptr<TokenSource> open_raw(const std::string& path,
                                      std::int64_t vocab_size,
                                      std::optional<std::int64_t> end_of_text,
                                      TokenType type);

}  // namespace moesaic::data
