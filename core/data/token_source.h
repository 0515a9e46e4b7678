#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/config/enums.h"
#include "core/data/token_meta.h"

namespace moesaic::data {

/// Byte-level vocabulary: token id = byte. Byte 0 does not occur in text and ends every document.
constexpr std::int32_t kByteVocabulary = 256;
constexpr std::int32_t kEndOfText = 0;
/// Label of a position without loss.
constexpr std::int32_t kIgnoredLabel = -100;

std::vector<std::int32_t> tokens_of_text(std::string_view text);
/// The text up to the first end-of-text token; ids outside [0, 256) become '?'.
std::string text_of_tokens(std::span<const std::int32_t> tokens);

/// What is known about the files of a source.
struct SourceInfo {
  config::DataFormat format =
      config::DataFormat::automatic;        ///< automatic: not from files of one format
  std::string type;                         ///< of the tokens in the file: "u16"; empty = text
  std::uint64_t bytes = 0;                  ///< of the files
  std::optional<std::int64_t> end_of_text;  ///< the id that closes documents, if one is known
  std::optional<TokenMeta> meta;
};

/// Documents of tokens. An end-of-text token, where the format has one, is a document's last token and counts in its
/// length. Immutable, so usable from several threads.
class TokenSource {
 public:
  virtual ~TokenSource() = default;
  virtual std::int64_t num_documents() const noexcept = 0;
  /// May be 0: such documents are passed over.
  virtual std::int64_t document_length(std::int64_t document) const = 0;
  /// Tokens [begin, begin + out.size()) of a document. Throws InputError (file:offset) for an id outside the vocabulary
  /// that the source was opened with.
  virtual void read(std::int64_t document,
                    std::int64_t begin,
                    std::span<std::int32_t> out) const = 0;
  /// out[i] = 1 where token begin + i is a target of the loss, else 0. Only sources that keep documents whole have others.
  virtual void read_targets(std::int64_t document, std::int64_t begin, std::span<char> out) const;
  /// Whether a document must lie in one window (conversations), or may be cut wherever a window ends.
  virtual bool keeps_documents_whole() const noexcept { return false; }
  virtual const std::string& name() const noexcept = 0;
  virtual std::int64_t num_tokens() const;
  virtual SourceInfo info() const { return {}; }
  /// Looks at every token, however many there are. Throws as read() does. Text was looked at when it was opened.
  virtual void check_ids() const {}
};

/// Opens a text file as byte-level tokens. The file is plain text (any encoding without zero bytes,
/// UTF-8 as a rule). A line that holds a form feed and nothing else (the bytes 0x0C 0x0A, or 0x0C
/// at the end of the file) separates two documents; a file without such lines is one document.
/// Empty documents are left out. The file is mapped, not read; it must not change while in use.
/// Throws InputError (file, file:offset) for a missing, unreadable or empty file, one without text,
/// a zero byte, or a byte that is not below `vocab_size`.
std::unique_ptr<TokenSource> open_text(const std::string& path,
                                       std::int64_t vocab_size = kByteVocabulary);

}  // namespace moesaic::data
