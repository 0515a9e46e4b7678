#include "core/data/token_source.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/base/error.h"

namespace moesaic::data {
namespace {

class MappedFile {
 public:
  explicit MappedFile(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe must not block here
    if (fd < 0) throw InputError(fmt::format("{}: cannot open: {}", path, std::strerror(errno)));
    struct stat info {};
    if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
      ::close(fd);
      throw InputError(fmt::format("{}: not a regular file; name one text file", path));
    }
    size_ = static_cast<std::size_t>(info.st_size);
    if (size_ == 0) {
      ::close(fd);
      throw InputError(fmt::format("{}: the file is empty", path));
    }
    void* p = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
    const int error = errno;
    ::close(fd);
    if (p == MAP_FAILED)
      throw InputError(
          fmt::format("{}: cannot map {} bytes: {}", path, size_, std::strerror(error)));
    data_ = static_cast<const unsigned char*>(p);
  }
  ~MappedFile() {
    ::munmap(const_cast<unsigned char*>(data_),
             size_);  // fails only for addresses that mmap did not give
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  const unsigned char* data() const noexcept { return data_; }
  std::int64_t size() const noexcept { return static_cast<std::int64_t>(size_); }

 private:
  const unsigned char* data_ = nullptr;
  std::size_t size_ = 0;
};

class TextSource final : public TokenSource {
 public:
  TextSource(const std::string& path, std::int64_t vocab_size) : path_(path), file_(path) {
    check_bytes(vocab_size);
    find_documents();
    if (documents_.empty())
      throw InputError(fmt::format("{}: no text between the document separators", path_));
  }
  std::int64_t num_documents() const noexcept override {
    return static_cast<std::int64_t>(documents_.size());
  }
  std::int64_t document_length(std::int64_t document) const override {
    const auto& d = at(document);
    return d.end - d.begin + 1;
  }
  void read(std::int64_t document, std::int64_t begin, std::span<std::int32_t> out) const override {
    const auto& d = at(document);
    const auto count = static_cast<std::int64_t>(out.size());
    MOESAIC_CHECK(0 <= begin && begin + count <= d.end - d.begin + 1,
                  "tokens outside the document");
    const unsigned char* from = file_.data() + d.begin + begin;
    const std::int64_t bytes = std::min(count, d.end - d.begin - begin);
    for (std::int64_t i = 0; i < bytes; ++i)
      out[static_cast<std::size_t>(i)] = from[i];
    if (bytes < count) out.back() = kEndOfText;
  }
  const std::string& name() const noexcept override { return path_; }

 private:
  struct Range {
    std::int64_t begin = 0, end = 0;
  };
  const Range& at(std::int64_t document) const {
    MOESAIC_CHECK(0 <= document && document < num_documents(), "no such document");
    return documents_[static_cast<std::size_t>(document)];
  }
  void check_bytes(std::int64_t vocab_size) const {
    const auto* data = file_.data();
    for (std::int64_t i = 0; i < file_.size(); ++i) {
      if (data[i] == kEndOfText) {
        throw InputError(fmt::format(
            "{}:{}: a zero byte; text files must not hold any (it is the end-of-text token)",
            path_,
            i));
      }
      if (data[i] >= vocab_size) {
        throw InputError(fmt::format(
            "{}:{}: token id {} is not below model.vocab_size = {}; byte-level text needs up to {}",
            path_,
            i,
            data[i],
            vocab_size,
            kByteVocabulary));
      }
    }
  }
  void find_documents() {
    const auto* data = file_.data();
    const std::int64_t size = file_.size();
    std::int64_t begin = 0;
    const auto close = [&](std::int64_t end) {
      if (end > begin) documents_.push_back({begin, end});
    };
    for (std::int64_t at = 0; at < size;) {
      const auto* found = static_cast<const unsigned char*>(
          std::memchr(data + at, '\f', static_cast<std::size_t>(size - at)));
      if (found == nullptr) break;
      const std::int64_t i = found - data;
      at = i + 1;
      const bool alone = (i == 0 || data[i - 1] == '\n') && (i + 1 == size || data[i + 1] == '\n');
      if (!alone) continue;
      close(i);
      begin = std::min(size, i + 2);
    }
    close(size);
  }

  std::string path_;
  MappedFile file_;
  std::vector<Range> documents_;
};

}  // namespace

std::vector<std::int32_t> tokens_of_text(std::string_view text) {
  std::vector<std::int32_t> tokens;
  tokens.reserve(text.size());
  for (const char c : text)
    tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

std::string text_of_tokens(std::span<const std::int32_t> tokens) {
  std::string text;
  for (const auto t : tokens) {
    if (t == kEndOfText) break;
    text.push_back(t > 0 && t < kByteVocabulary ? static_cast<char>(t) : '?');
  }
  return text;
}

std::int64_t TokenSource::num_tokens() const {
  std::int64_t n = 0;
  for (std::int64_t d = 0; d < num_documents(); ++d)
    n += document_length(d);
  return n;
}

std::unique_ptr<TokenSource> open_text(const std::string& path, std::int64_t vocab_size) {
  return std::make_unique<TextSource>(path, vocab_size);
}

}  // namespace moesaic::data
