#pragma once
#include <cstdint>

#include "core/data/token_source.h"

namespace moesaic::data {

/// A checksum of the number of documents and tokens and of the lengths and ends of up to 64 documents that lie evenly in the source:
/// what tells whether two machines have the same files, without reading them. Throws as read() does.
std::uint32_t fingerprint(const TokenSource& source);

}  // namespace moesaic::data
