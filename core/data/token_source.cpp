#include "core/data/token_source.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "core/base/durable_file.h"
#include "core/base/error.h"
#include "core/data/foreign_file.h"

namespace moesaic::data {
namespace {

class TextSource final : public TokenSource {
 public:
  TextSource(const std::string& path, std::int64_t vocab_size)
      : path_(path), file_(path, MappedFile::Links::follow) {
    if (file_.size() == 0) throw InputError(fmt::format("{}: the file is empty", path));
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
    const unsigned char* from = bytes() + d.begin + begin;
    const std::int64_t bytes = std::min(count, d.end - d.begin - begin);
    for (std::int64_t i = 0; i < bytes; ++i)
      out[static_cast<std::size_t>(i)] = from[i];
    if (bytes < count) out.back() = kEndOfText;
  }
  const std::string& name() const noexcept override { return path_; }
  SourceInfo info() const override {
    return {.format = config::DataFormat::bytes_text,
            .type = "",
            .bytes = file_.size(),
            .end_of_text = kEndOfText,
            .meta = std::nullopt};
  }

 private:
  struct Range {
    std::int64_t begin = 0, end = 0;
  };
  const Range& at(std::int64_t document) const {
    MOESAIC_CHECK(0 <= document && document < num_documents(), "no such document");
    return documents_[static_cast<std::size_t>(document)];
  }
  const unsigned char* bytes() const {
    return reinterpret_cast<const unsigned char*>(file_.data());
  }
  std::int64_t size() const { return static_cast<std::int64_t>(file_.size()); }
  void check_bytes(std::int64_t vocab_size) const {
    const auto* data = bytes();
    for (std::int64_t i = 0; i < size(); ++i) {
      if (data[i] == kEndOfText) {
        const std::string kind = looks_like({file_.data(), file_.size()});
        throw InputError(fmt::format(
            "{}:{}: a zero byte; text files must not hold any (it is the end-of-text token){}",
            path_,
            i,
            kind.empty() ? "" : "; this is " + kind));
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
    const auto* data = bytes();
    const std::int64_t end = size();
    std::int64_t begin = 0;
    const auto close = [&](std::int64_t until) {
      if (until > begin) documents_.push_back({begin, until});
    };
    for (std::int64_t at = 0; at < end;) {
      const auto* found = static_cast<const unsigned char*>(
          std::memchr(data + at, '\f', static_cast<std::size_t>(end - at)));
      if (found == nullptr) break;
      const std::int64_t i = found - data;
      at = i + 1;
      const bool alone = (i == 0 || data[i - 1] == '\n') && (i + 1 == end || data[i + 1] == '\n');
      if (!alone) continue;
      close(i);
      begin = std::min(end, i + 2);
    }
    close(end);
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

void TokenSource::read_targets(std::int64_t, std::int64_t, std::span<char> out) const {
  std::fill(out.begin(), out.end(), char{1});
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
