// tokenizer.json files, with a tokenizer_config.json behind a zero byte. Accepted ⇒ a text can be encoded, and every id that comes out is
// below the size of the vocabulary.
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/tokenizer_use.h"

using namespace moesaic;

MOESAIC_FUZZ_TARGET(tokenizer_json) {
  const fuzz::Files files(input);
  std::shared_ptr<const tokenizer::Tokenizer> made;
  if (fuzz::accepts([&] {
        made = tokenizer::parse_tokenizer_json(files.file, files.config, "a/tokenizer.json");
      })) {
    fuzz::require_strict_json(files.file);
    fuzz::use(*made, files.config);
  }
}
