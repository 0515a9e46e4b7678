// Documents from JSONL files. Accepted ⇒ the documents, written as JSONL, read back as the same.
#include "core/data/document_reader.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/memory_file.h"
#include "tests/fuzz/strict_json.h"

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

template <class Visit>
void each_line(std::string_view text, const Visit& visit) {
  constexpr std::string_view mark = "\xEF\xBB\xBF";
  if (text.substr(0, mark.size()) == mark) text.remove_prefix(mark.size());
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    if (line.find_first_not_of(" \t\r") != std::string_view::npos) visit(line);
    text.remove_prefix(std::min(line.size() + 1, text.size()));
  }
}

}  // namespace

MOESAIC_FUZZ_TARGET(jsonl) {
  std::vector<std::string> documents;
  if (!fuzz::accepts([&] { documents = documents_of(input); })) return;
  each_line(input, fuzz::require_strict_json);
  std::string again;
  for (const auto& text : documents)
    again += nlohmann::json{{"text", text}}.dump() + "\n";
  if (!again.empty())
    fuzz::require(documents_of(again) == documents, "documents read back as the same");
}
