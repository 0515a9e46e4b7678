// Token files of llm.c. Accepted ⇒ header and tokens are the file.
#include "core/data/llmc_header.h"

#include "tests/fuzz/fuzz.h"

using namespace moesaic;

MOESAIC_FUZZ_TARGET(llmc_header) {
  const auto file = fuzz::bytes_of(input);
  data::LlmcHeader header;
  if (!fuzz::accepts([&] { header = data::parse_llmc_header(file, "a.bin"); })) return;
  fuzz::require(data::has_llmc_magic(file), "a file that is accepted has the magic number");
  fuzz::require(header.num_tokens > 0, "there is data");
  const auto tokens = static_cast<std::size_t>(header.num_tokens);
  fuzz::require(data::LlmcHeader::kBytes + tokens * data::byte_size(header.type) == input.size(),
                "the tokens fill the file");
  std::vector<std::int32_t> out(tokens);
  const auto* body = file.data() + data::LlmcHeader::kBytes;
  const auto bad = data::decode_tokens(header.type, body, 50257, out);
  fuzz::require(
      bad.has_value() == data::find_bad_token(header.type, body, tokens, 50257).has_value(),
      "decoding and looking for bad tokens agree");
}
