#pragma once
#include <memory>
#include <string>

#include "core/data/token_source.h"

namespace moesaic::data {

/// PREFIX.bin and PREFIX.idx, mapped. The documents are those of the index; an end-of-text token is one where the writer put
/// it. `vocab_size`: ids must be below, which read() checks. The files must not change while in use. Throws InputError
/// (file:offset).
std::unique_ptr<TokenSource> open_megatron(const std::string& path, std::int64_t vocab_size);

}  // namespace moesaic::data
