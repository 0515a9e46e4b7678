#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace moesaic::data {

enum class TextFormat { automatic, text, jsonl };

struct ReaderOptions {
  TextFormat format =
      TextFormat::automatic;  ///< automatic: .jsonl and .ndjson are JSONL, the rest text
  std::string json_key = "text";
  std::int64_t max_document = std::int64_t{256} << 20;  ///< bytes
  bool split_long = false;  ///< longer documents come in pieces, not as an error
  std::int64_t piece = std::int64_t{16} << 20;  ///< bytes; of a document that is split
};

/// A document, or a piece of one.
struct TextPiece {
  std::string text;
  bool ends_document = true;
  std::uint32_t file = 0;  ///< index into the inputs
  std::int64_t line = 0;   ///< where the document begins, from 1
};

/// Reads documents from files one after the other, in memory for one document. Text: form-feed lines separate documents,
/// exactly as in open_text(). JSONL: an object a line, its member `json_key` is a document; lines of white space are
/// passed over. "-" is standard input. Empty documents are left out.
class DocumentReader {
 public:
  DocumentReader(std::vector<std::string> inputs, ReaderOptions options);
  ~DocumentReader();
  DocumentReader(const DocumentReader&) = delete;
  DocumentReader& operator=(const DocumentReader&) = delete;

  /// The next piece; false at the end. Throws InputError: a file that cannot be read or is not text (gzip, a token file …), and with
  /// file:line a line that is no JSON object with that member, or a document above max_document.
  bool next(TextPiece& piece);
  std::int64_t bytes_read() const noexcept;
  std::int64_t empty_documents() const noexcept;
  /// "file:line"
  std::string where(const TextPiece& piece) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::data
