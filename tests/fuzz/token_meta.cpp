// meta.json of token files. Accepted ⇒ written again and read again it is the same, and all of the text was read.
#include "core/data/token_meta.h"

#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/strict_json.h"

using namespace moesaic;

MOESAIC_FUZZ_TARGET(token_meta) {
  data::TokenMeta meta;
  if (!fuzz::accepts([&] { meta = data::parse_token_meta(input, "a.meta.json"); })) return;
  fuzz::require_strict_json(input);
  const std::string text = to_json(meta);
  fuzz::require(to_json(data::parse_token_meta(text, "again")) == text,
                "what is written reads back as the same");
}
