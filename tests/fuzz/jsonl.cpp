// Documents from JSONL files. Accepted ⇒ the documents, written as JSONL, read back as the same.
#include <nlohmann/json.hpp>

#include "core/data/document_reader.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/memory_file.h"

using namespace moesaic;

namespace {

std::vector<std::string> documents_of(std::string_view content) {
  const fuzz::MemoryFile file(content);
  data::ReaderOptions options;
  options.format = data::TextFormat::jsonl;
  data::DocumentReader reader({file.path()}, options);
  std::vector<std::string> documents;
  for (data::TextPiece piece; reader.next(piece);) {
    fuzz::require(piece.ends_document && !piece.text.empty(), "whole documents, no empty ones");
    documents.push_back(piece.text);
  }
  return documents;
}

}  // namespace

MOESAIC_FUZZ_TARGET(jsonl) {
  std::vector<std::string> documents;
  if (!fuzz::accepts([&] { documents = documents_of(input); })) return;
  fuzz::require(input.find('\0') == std::string_view::npos, "JSON holds no zero byte");
  std::string again;
  for (const auto& text : documents)
    again += nlohmann::json{{"text", text}}.dump() + "\n";
  if (!again.empty())
    fuzz::require(documents_of(again) == documents, "documents read back as the same");
}
