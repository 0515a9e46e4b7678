#include "core/data/document_reader.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <span>
#include <string_view>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/base/error.h"
#include "core/data/foreign_file.h"
#include "core/data/json_line.h"

namespace moesaic::data {
namespace {

constexpr std::size_t kBuffer = std::size_t{1} << 20;  // of a large file, or a pipe
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

// A file or pipe, line by line, in parts where a line is long.
class LineFile {
 public:
  explicit LineFile(const std::string& path) : path_(path) {
    fd_ = path == "-" ? ::dup(STDIN_FILENO) : ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd_ < 0) throw InputError(fmt::format("{}: cannot open: {}", path, std::strerror(errno)));
    struct stat info {};
    const bool known = ::fstat(fd_, &info) == 0;
    if (known && S_ISDIR(info.st_mode)) {
      ::close(fd_);
      throw InputError(fmt::format("{}: a folder; name text or JSONL files", path));
    }
    // Many data sets are many small files: those get a small buffer, with a byte to see their end. Files of the system have no size.
    const auto bytes = known && S_ISREG(info.st_mode) ? static_cast<std::size_t>(info.st_size) : 0;
    capacity_ = bytes == 0 ? kBuffer : std::min(bytes + 1, kBuffer);
    buffer_ = std::make_unique_for_overwrite<char[]>(capacity_);
  }
  ~LineFile() { ::close(fd_); }
  LineFile(const LineFile&) = delete;
  LineFile& operator=(const LineFile&) = delete;

  /// What is in memory of the current line, with its newline where that is reached; empty at the end of the file. Valid
  /// until the next call.
  std::string_view part(std::atomic<std::int64_t>& bytes_read) {
    if (at_ == filled_) fill(bytes_read);
    const std::string_view rest(buffer_.get() + at_, filled_ - at_);
    const auto newline = rest.find('\n');
    const std::string_view part =
        newline == std::string_view::npos ? rest : rest.substr(0, newline + 1);
    at_ += part.size();
    return part;
  }
  std::string_view first_bytes(std::atomic<std::int64_t>& bytes_read) {
    if (filled_ == 0) fill(bytes_read);
    return {buffer_.get(), filled_};
  }

 private:
  void fill(std::atomic<std::int64_t>& bytes_read) {
    ssize_t got;
    do {
      got = ::read(fd_, buffer_.get(), capacity_);
    } while (got < 0 && errno == EINTR);
    if (got < 0)
      throw InputError(fmt::format("{}: cannot be read: {}", path_, std::strerror(errno)));
    at_ = 0;
    filled_ = static_cast<std::size_t>(got);
    bytes_read += got;
  }
  std::string path_;
  int fd_ = -1;
  std::unique_ptr<char[]> buffer_;  // not filled beforehand
  std::size_t capacity_ = 0, at_ = 0, filled_ = 0;
};

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\r\n") == std::string_view::npos;
}

// Bytes of `text` for a piece of at most `most`: up to a line's end if there is one in the second half, else up to the
// start of a character.
std::size_t cut_of(std::string_view text, std::size_t most) {
  if (text.size() <= most) return text.size();
  const auto newline = text.rfind('\n', most - 1);
  if (newline != std::string_view::npos && newline >= most / 2) return newline + 1;
  std::size_t cut = most;
  while (cut > most - 4 && (static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80)
    --cut;
  return cut;
}

}  // namespace

struct DocumentReader::Impl {
  std::vector<std::string> inputs;
  ReaderOptions options;
  std::size_t next_file = 0;
  std::unique_ptr<LineFile> file;
  bool jsonl = false, file_done = true;
  std::int64_t line = 0;  // the one read last
  bool line_start = true;
  std::atomic<std::int64_t> bytes_read{0}, empty{0};

  std::string pending;     // of the open document
  std::size_t handed = 0;  // … and how much of that was handed out
  std::int64_t document_line = 0;
  bool complete = false;   // `pending` holds the rest of its document
  bool is_long = false;    // … which comes in pieces
  bool continued = false;  // some of which were handed out
  std::string json;        // the line being put together

  std::size_t most() const { return static_cast<std::size_t>(options.max_document); }
  std::size_t piece() const { return static_cast<std::size_t>(options.piece); }
  std::string_view rest() const { return std::string_view(pending).substr(handed); }
  std::string here(std::int64_t at) const {
    return fmt::format("{}:{}", inputs[next_file - 1], at);
  }
  bool open_next();
  bool next(TextPiece& out);
  void read_text();
  void read_json();
  bool keep_reading();
  void hand_out(TextPiece& out, std::size_t bytes);
};

bool DocumentReader::Impl::open_next() {
  file.reset();
  if (next_file == inputs.size()) return false;
  const std::string& path = inputs[next_file++];
  file = std::make_unique<LineFile>(path);
  file_done = false;
  line = 0;
  line_start = true;
  const auto has = [&path](std::string_view end) { return path.ends_with(end); };
  jsonl = options.format == TextFormat::jsonl ||
          (options.format == TextFormat::automatic && (has(".jsonl") || has(".ndjson")));
  const std::string_view first = file->first_bytes(bytes_read);
  const std::string kind = first.empty() ? "" : looks_like(std::as_bytes(std::span(first)));
  if (!kind.empty() && kind != "a text file")
    throw InputError(fmt::format("{}: neither text nor JSONL, but {}", path, kind));
  return true;
}

// Whether the open document may still grow. One that is too long is refused, or comes in pieces from here on.
bool DocumentReader::Impl::keep_reading() {
  if (rest().size() <= (is_long ? piece() : most())) return true;
  is_long = true;
  if (options.split_long) return false;
  throw InputError(fmt::format(
      "{}: this document has more than {} bytes; separate documents by a line that holds a form "
      "feed alone, raise --max-document, or say --long-documents split (tokens at the cuts may "
      "then "
      "differ from those of the whole)",
      here(document_line),
      options.max_document));
}

void DocumentReader::Impl::read_text() {
  while (keep_reading()) {
    std::string_view part = file->part(bytes_read);
    if (part.empty()) {
      complete = file_done = true;
      return;
    }
    if (line_start) {
      ++line;
      if (rest().empty() && !continued) document_line = line;
      bool separator = part == "\f\n";
      if (part == "\f") {  // its newline may be beyond what is in memory
        part = file->part(bytes_read);
        separator = part.empty() || part == "\n";
        if (!separator) pending += '\f';
      }
      if (separator) {
        complete = true;
        return;
      }
    }
    pending += part;
    line_start = part.back() == '\n';
  }
}

void DocumentReader::Impl::read_json() {
  for (;;) {
    json.clear();
    std::string_view part;
    do {
      part = file->part(bytes_read);
      json += part;
      // Escapes take up to six bytes for one, and other members may be there.
      if (json.size() / 8 > most())
        throw InputError(fmt::format("{}: this line has more than {} bytes; raise --max-document",
                                     here(line + 1),
                                     8 * most()));
    } while (!part.empty() && part.back() != '\n');
    if (json.empty()) {
      file_done = true;
      return;
    }
    ++line;
    std::string_view text = json;
    if (line == 1 && text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
    if (is_blank(text)) continue;
    if (text.back() == '\n') text.remove_suffix(1);
    document_line = line;
    pending = text_of_json_line(text, options.json_key, here(line));
    keep_reading();
    complete = true;
    return;
  }
}

void DocumentReader::Impl::hand_out(TextPiece& out, std::size_t bytes) {
  out.ends_document = complete && bytes == rest().size();
  out.file = static_cast<std::uint32_t>(next_file - 1);
  out.line = document_line;
  if (handed == 0 && bytes == pending.size()) {
    out.text = std::move(pending);
    pending.clear();
  } else {
    out.text.assign(pending, handed, bytes);
    handed += bytes;
    if (2 * handed >= pending.size()) {  // not for every small piece of a large part
      pending.erase(0, handed);
      handed = 0;
    }
  }
  continued = !out.ends_document;
  if (out.ends_document) complete = is_long = false;
}

bool DocumentReader::Impl::next(TextPiece& out) {
  for (;;) {
    if (!complete && !(is_long && rest().size() > piece())) {
      if (file_done && !open_next()) return false;
      jsonl ? read_json() : read_text();
    }
    if (is_long && rest().size() > piece()) {
      hand_out(out, cut_of(rest(), piece()));
      return true;
    }
    if (!complete) continue;  // the end of a JSONL file
    if (rest().empty() && !continued) {
      if (jsonl || !file_done) ++empty;  // behind the last separator of a text there is no document
      complete = false;
      continue;
    }
    hand_out(out, rest().size());
    return true;
  }
}

DocumentReader::DocumentReader(std::vector<std::string> inputs, ReaderOptions options)
    : impl_(std::make_unique<Impl>()) {
  MOESAIC_CHECK(0 < options.piece && options.piece <= options.max_document, "sizes of pieces");
  impl_->inputs = std::move(inputs);
  impl_->options = std::move(options);
}
DocumentReader::~DocumentReader() = default;

bool DocumentReader::next(TextPiece& piece) {
  return impl_->next(piece);
}
std::int64_t DocumentReader::bytes_read() const noexcept {
  return impl_->bytes_read;
}
std::int64_t DocumentReader::empty_documents() const noexcept {
  return impl_->empty;
}
std::string DocumentReader::where(const TextPiece& piece) const {
  return fmt::format("{}:{}", impl_->inputs[piece.file], piece.line);
}

}  // namespace moesaic::data
