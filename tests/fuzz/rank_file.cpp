// tiktoken rank files, with a tokenizer_config.json behind a zero byte; the 256 single bytes are put in front of them, or nothing
// shorter than that would be accepted.
#include <fmt/format.h>

#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/tokenizer_use.h"

using namespace moesaic;

namespace {

std::string single_bytes() {
  constexpr std::string_view digits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t byte = 0; byte < 256; ++byte)
    text += fmt::format("{}{}== {}\n", digits[byte >> 2], digits[(byte & 3) << 4], byte);
  return text;
}

}  // namespace

MOESAIC_FUZZ_TARGET(rank_file) {
  static const std::string bytes = single_bytes();
  const fuzz::Files files(input);
  std::shared_ptr<const tokenizer::Tokenizer> made;
  fuzz::accepts([&] { tokenizer::parse_rank_file(files.file, files.config, "a/b.tiktoken"); });
  if (fuzz::accepts([&] {
        made = tokenizer::parse_rank_file(
            bytes + std::string(files.file), files.config, "a/b.tiktoken");
      }))
    fuzz::use(*made, files.config);
}
