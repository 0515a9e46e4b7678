// Lines of chat files. Accepted ⇒ JSON to its last byte, with something to learn, as text that is UTF-8.
#include "core/data/chat_record.h"

#include <algorithm>

#include "core/tokenizer/utf8.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/strict_json.h"

using namespace moesaic;

MOESAIC_FUZZ_TARGET(chat_record) {
  std::vector<data::ChatPiece> pieces;
  if (!fuzz::accepts([&] { pieces = data::parse_chat_record(input, "a.jsonl:1"); })) return;
  fuzz::require_strict_json(input);
  fuzz::require(
      std::any_of(pieces.begin(), pieces.end(), [](const auto& p) { return p.is_target; }),
      "a record has a target");
  std::size_t bytes = 0;
  for (const auto& piece : pieces) {
    fuzz::require(tokenizer::valid_utf8_prefix(piece.text) == piece.text.size(), "texts are UTF-8");
    bytes += piece.text.size();
  }
  fuzz::require(bytes <= 2 * input.size() + 64, "texts are not larger than their record");
}
