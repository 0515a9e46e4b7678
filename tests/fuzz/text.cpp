// Text files with several documents. The mapped reader of training and the streaming one of tokenization agree on every document,
// also where long documents come in pieces.
#include "core/data/document_reader.h"
#include "core/data/token_source.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/memory_file.h"

using namespace moesaic;

namespace {

using Documents = std::vector<std::string>;

Documents mapped(const std::string& path) {
  const auto source = data::open_text(path);
  Documents documents;
  for (std::int64_t d = 0; d < source->num_documents(); ++d) {
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(source->document_length(d)));
    source->read(d, 0, tokens);
    fuzz::require(tokens.size() > 1 && tokens.back() == data::kEndOfText,
                  "a document has text and ends with the end-of-text token");
    documents.push_back(data::text_of_tokens(tokens));
  }
  return documents;
}

Documents streamed(const std::string& path, std::int64_t piece) {
  data::ReaderOptions options;
  options.format = data::TextFormat::text;
  if (piece > 0) {
    options.piece = options.max_document = piece;
    options.split_long = true;
  }
  data::DocumentReader reader({path}, options);
  Documents documents;
  bool open = false;
  for (data::TextPiece part; reader.next(part); open = !part.ends_document) {
    if (!open) documents.emplace_back();
    documents.back() += part.text;
  }
  fuzz::require(!open, "the last document ends");
  return documents;
}

}  // namespace

MOESAIC_FUZZ_TARGET(text) {
  const fuzz::MemoryFile file(input);
  Documents training, whole, pieces;
  const bool trains = fuzz::accepts([&] { training = mapped(file.path()); });
  if (!fuzz::accepts([&] { whole = streamed(file.path(), 0); })) return;
  if (trains) fuzz::require(training == whole, "both readers see the same documents");
  for (const std::int64_t piece : {5, 64}) {
    pieces = streamed(file.path(), piece);
    fuzz::require(pieces == whole, "pieces make up their documents");
  }
}
