#pragma once
// The JSON header of a safetensors file; used by safetensors.cpp and its tests only.
#include <cstdint>
#include <map>
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

/// "F32", … for a dtype; the inverse is part of parse_header.
const char* stored_name(DType dtype);

}  // namespace moesaic::safetensors
