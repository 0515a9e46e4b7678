#pragma once
// The JSON header of a safetensors file; used by safetensors.cpp and its tests only.
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/checkpoint/safetensors.h"

namespace moesaic::safetensors {

constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the format's own library

struct Header {
  std::map<std::string, StoredTensor> tensors;
  std::map<std::string, std::string> metadata;
};

/// Parses the header text and checks every entry against a data section of `data_bytes` bytes. `file` is used in errors.
/// Throws InputError.
Header parse_header(std::string_view text, std::uint64_t data_bytes, const std::string& file);

/// Sets offset and bytes of entries that lie one after the other. Larger element types must come first, so that every
/// tensor is aligned to its elements.
void place(std::vector<StoredTensor>& entries);
/// The first bytes of a file with these placed entries: header length, JSON, spaces up to a multiple of 8. Throws
/// InputError for a name or metadata text that is not UTF-8, InternalError for a name that appears twice.
std::string header_text(const std::vector<StoredTensor>& placed,
                        const std::map<std::string, std::string>& metadata,
                        const std::string& file);

/// "F32", … for a dtype, and back; nothing for a text that is not such a name.
const char* stored_name(DType dtype);
std::optional<DType> dtype_from_stored_name(std::string_view text);

}  // namespace moesaic::safetensors
