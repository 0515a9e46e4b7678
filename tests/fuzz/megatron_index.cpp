// Megatron .idx files behind a u64, the size of the .bin file. Accepted ⇒ the documents follow each other and fill the .bin file.
#include "core/data/megatron_index.h"

#include <optional>

#include "tests/fuzz/fuzz.h"

using namespace moesaic;

MOESAIC_FUZZ_TARGET(megatron_index) {
  const std::uint64_t bin_bytes = fuzz::take_u64(input);
  std::optional<data::MegatronIndex> index;
  if (!fuzz::accepts([&] { index.emplace(fuzz::bytes_of(input), bin_bytes, "a.idx", "a.bin"); }))
    return;
  fuzz::require(index->num_sequences() > 0 && index->num_documents() > 0, "there is data");
  std::int64_t at = 0;
  for (std::int64_t d = 0; d < index->num_documents(); ++d) {
    fuzz::require(index->document_begin(d) == at, "a document begins where the last one ended");
    fuzz::require(index->document_length(d) >= 0, "no document has a negative length");
    at += index->document_length(d);
  }
  fuzz::require(at == index->num_tokens(), "the documents hold all tokens");
  fuzz::require(static_cast<std::uint64_t>(at) * data::byte_size(index->type()) == bin_bytes,
                "the tokens fill the .bin file");
}
