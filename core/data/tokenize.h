#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "core/data/document_reader.h"
#include "core/data/megatron_writer.h"
#include "core/tokenizer/tokenizer.h"

namespace moesaic::data {

struct TokenizeOptions {
  tokenizer::EncodeOptions encode;
  std::optional<std::int32_t> end_of_text;  ///< closes every document
  bool refuse_invalid_utf8 = false;         ///< otherwise U+FFFD takes its place
  int threads = 1;
  /// Text that is read but not yet written; at least one piece always is.
  std::int64_t bytes_in_flight = std::int64_t{64} << 20;
};

struct TokenizeStats {
  std::int64_t bytes_read = 0, documents = 0, empty_documents = 0, tokens = 0;
  std::int64_t text_bytes = 0;  ///< of the documents
  std::int64_t replaced = 0;    ///< invalid UTF-8 sequences
  std::string first_replaced;   ///< file:line of the document with the first
};

/// Writes the documents of `reader` as tokens, in their order, through `writer`: one thread reads, `threads` threads encode, the
/// caller's writes. The result does not depend on the number of threads; memory is bounded by `bytes_in_flight` and the longest piece.
/// `progress` is called from the caller's thread now and then. The writer is not finished. Throws what reader, tokenizer (with
/// file:line) and writer throw: of several errors the one that stands first in the input.
TokenizeStats tokenize(DocumentReader& reader,
                       const tokenizer::Tokenizer& tokenizer,
                       MegatronWriter& writer,
                       const TokenizeOptions& options,
                       const std::function<void(const TokenizeStats&)>& progress);

}  // namespace moesaic::data
