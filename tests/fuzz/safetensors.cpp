// Headers of safetensors files behind a u64, the size of the data section. Accepted ⇒ every tensor lies in the data section and has
// the bytes of its shape; the header that we write for the same tensors reads back as the same.
#include <algorithm>

#include "core/checkpoint/safetensors_header.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/strict_json.h"

using namespace moesaic;

namespace {

void check_span(const StoredTensor& t, std::uint64_t data_bytes) {
  fuzz::require(t.offset <= data_bytes && t.bytes <= data_bytes - t.offset,
                "a tensor lies in the data section");
  std::uint64_t bytes = byte_size(t.dtype);
  for (int i = 0; i < t.shape.rank; ++i)
    bytes *= static_cast<std::uint64_t>(t.shape[i]);
  fuzz::require(bytes == t.bytes, "a tensor has the bytes of its shape");
}

}  // namespace

MOESAIC_FUZZ_TARGET(safetensors) {
  const std::uint64_t data_bytes = fuzz::take_u64(input);
  safetensors::Header header;
  if (!fuzz::accepts(
          [&] { header = safetensors::parse_header(input, data_bytes, "a.safetensors"); }))
    return;
  fuzz::require_strict_json(input);
  std::vector<StoredTensor> placed;
  for (const auto& [name, t] : header.tensors) {
    fuzz::require(name == t.name, "a tensor is found under its name");
    check_span(t, data_bytes);
    placed.push_back(t);
  }
  const std::string written = safetensors::header_text(placed, header.metadata, "again");
  const auto again = safetensors::parse_header(written.substr(8), data_bytes, "again");
  fuzz::require(again.metadata == header.metadata, "metadata reads back as the same");
  fuzz::require(std::equal(again.tensors.begin(),
                           again.tensors.end(),
                           header.tensors.begin(),
                           header.tensors.end(),
                           [](const auto& a, const auto& b) {
                             return a.first == b.first && a.second.dtype == b.second.dtype &&
                                    a.second.shape == b.second.shape &&
                                    a.second.offset == b.second.offset;
                           }),
                "tensors read back as the same");
}
