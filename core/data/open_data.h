#pragma once
#include <memory>
#include <vector>

#include "core/config/config.h"
#include "core/data/blend.h"
#include "core/data/token_source.h"
#include "core/tokenizer/tokenizer.h"

namespace moesaic::data {

/// What opens conversations; null = bytes.
using TokenizerPointer = std::shared_ptr<const tokenizer::Tokenizer>;

/// Entries of data.train or data.valid as one source, their files one after the other. Throws InputError.
std::shared_ptr<const TokenSource> open_tokens(const std::vector<config::DataFileConfig>& entries,
                                               const config::Config& config,
                                               const TokenizerPointer& tokenizer = nullptr);

/// data.train: one source or, with weights, one per entry.
Blend open_training_data(const config::Config& config, const TokenizerPointer& tokenizer = nullptr);

}  // namespace moesaic::data
