#pragma once
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/tokenizer/added_tokens.h"
#include "core/tokenizer/bpe.h"
#include "core/tokenizer/pre_tokenizer.h"
#include "core/tokenizer/tokenizer.h"

namespace moesaic::tokenizer {

/// Ids beyond this are refused: tables are as long as the largest id.
constexpr std::int64_t kMaxId = (std::int64_t{1} << 22) - 1;

/// What the file formats are read into.
struct BpeParts {
  std::string name, content_hash;
  bool nfc = false;
  std::vector<AddedToken> added;
  std::vector<SplitStep> steps;
  BpeModel model;
  std::vector<std::int32_t> before, after;  ///< what add_special puts around a text
  std::optional<std::int32_t> end_of_text;
};

/// Byte-level byte-pair encoding, whatever file it came from: added tokens as written, normalisation, added tokens of
/// normalised text, pre-tokenization, merges.
std::shared_ptr<const Tokenizer> make_bpe_tokenizer(BpeParts parts);

/// The last folder and the name of a file: "DeepSeek-V3/tokenizer.json".
std::string short_name(const std::string& file);

/// Throws InputError when the ids of a file of `tokens` tokens leave more free than used (and 65,536): the table of all ids must not
/// be out of proportion to its file.
void require_few_gaps(std::int64_t largest, std::size_t tokens, const std::string& where);

/// "crc32c:0123abcd:7847602"
std::string content_hash_of(std::string_view bytes);

/// The token that closes a document: the eos_token of a tokenizer_config.json (`config`, may be empty; `file` names the
/// tokenizer), else the one of the usual names that is among the added tokens, else none. Throws InputError when
/// eos_token is no added token.
std::optional<std::int32_t> find_end_of_text(const std::vector<AddedToken>& added,
                                             std::string_view config,
                                             const std::string& file);

/// The name in messages of the tokenizer_config.json beside `file`.
std::string config_name(const std::string& file);

}  // namespace moesaic::tokenizer
