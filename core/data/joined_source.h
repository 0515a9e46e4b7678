#pragma once
#include <memory>
#include <vector>

#include "core/data/token_source.h"

namespace moesaic::data {

/// Several sources as one: their documents one after the other, in the order given.
std::shared_ptr<const TokenSource> join_sources(
    std::vector<std::shared_ptr<const TokenSource>> sources);

}  // namespace moesaic::data
