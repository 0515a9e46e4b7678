#pragma once
#include <memory>
#include <vector>

#include "core/config/config.h"
#include "core/data/blend.h"
#include "core/data/token_source.h"

namespace moesaic::data {

/// Entries of data.train or data.valid as one source, their files one after the other. Throws InputError.
std::shared_ptr<const TokenSource> open_tokens(const std::vector<config::DataFileConfig>& entries,
                                               const config::Config& config);

/// data.train: one source or, with weights, one per entry.
Blend open_training_data(const config::Config& config);

}  // namespace moesaic::data
