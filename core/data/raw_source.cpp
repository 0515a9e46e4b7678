#include "core/data/raw_source.h"

#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/data/foreign_file.h"
#include "core/data/llmc_header.h"
#include "core/data/mapped_tokens.h"
#include "core/data/token_files.h"

namespace moesaic::data {
namespace {

class RawSource final : public TokenSource {
 public:
  RawSource(const std::string& path, std::int64_t vocab_size) : tokens_(path, vocab_size) {}

  // The file's tokens are known; finds the documents.
  void open(config::DataFormat format,
            std::uint64_t begin,
            std::int64_t count,
            TokenType type,
            std::optional<std::int64_t> end_of_text) {
    format_ = format;
    end_of_text_ = end_of_text;
    tokens_.set_range(begin, count, type);
    tokens_.set_document_lookup([this](std::int64_t token) { return document_of(token); });
    if (end_of_text) ends_ = tokens_.ends_after(*end_of_text);
    if (ends_.empty() || ends_.back() != count) ends_.push_back(count);
    if (tokens_.bytes().size() <= FileOptions::kScannedBytes) tokens_.check_all();
  }
  const MappedTokens& tokens() const noexcept { return tokens_; }

  std::int64_t num_documents() const noexcept override {
    return static_cast<std::int64_t>(ends_.size());
  }
  std::int64_t document_length(std::int64_t document) const override {
    return ends_[static_cast<std::size_t>(document)] - begin_of(document);
  }
  void read(std::int64_t document, std::int64_t begin, std::span<std::int32_t> out) const override {
    MOESAIC_CHECK(
        0 <= begin && begin + static_cast<std::int64_t>(out.size()) <= document_length(document),
        "tokens outside the document");
    tokens_.read(begin_of(document) + begin, out);
  }
  const std::string& name() const noexcept override { return tokens_.path(); }
  std::int64_t num_tokens() const override { return tokens_.count(); }
  SourceInfo info() const override {
    return {.format = format_,
            .type = data::name(tokens_.type()),
            .bytes = tokens_.bytes().size(),
            .end_of_text = end_of_text_,
            .meta = std::nullopt};
  }
  void check_ids() const override { tokens_.check_all(); }

 private:
  std::int64_t begin_of(std::int64_t document) const {
    return document == 0 ? 0 : ends_[static_cast<std::size_t>(document) - 1];
  }
  std::int64_t document_of(std::int64_t token) const {
    return std::upper_bound(ends_.begin(), ends_.end(), token) - ends_.begin();
  }

  MappedTokens tokens_;
  config::DataFormat format_ = config::DataFormat::nanogpt;
  std::optional<std::int64_t> end_of_text_;
  std::vector<std::int64_t> ends_;  // of each document
};

}  // namespace

std::unique_ptr<TokenSource> open_llmc(const std::string& path,
                                       std::int64_t vocab_size,
                                       std::optional<std::int64_t> end_of_text) {
  auto source = std::make_unique<RawSource>(path, vocab_size);
  const LlmcHeader header = parse_llmc_header(source->tokens().bytes(), path);
  source->open(config::DataFormat::llmc,
               LlmcHeader::kBytes,
               header.num_tokens,
               header.type,
               end_of_text.value_or(header.end_of_text));
  return source;
}

std::unique_ptr<TokenSource> open_raw(const std::string& path,
                                      std::int64_t vocab_size,
                                      std::optional<std::int64_t> end_of_text,
                                      TokenType type) {
  auto source = std::make_unique<RawSource>(path, vocab_size);
  const auto bytes = source->tokens().bytes();
  if (bytes.empty()) throw InputError(fmt::format("{}: the file is empty", path));
  // Any bytes are numbers, so what is clearly something else is refused.
  if (const std::string kind = looks_like(bytes); !kind.empty() && !kind.starts_with("zero bytes"))
    bad_file(
        path, 0, fmt::format("not a file of {} tokens: it starts like {}", data::name(type), kind));
  if (has_llmc_magic(bytes))
    bad_file(path, 0, "not a raw token file: it has a header of llm.c; set data.format: llmc");
  if (bytes.size() % byte_size(type) != 0) {
    bad_file(
        path,
        bytes.size(),
        fmt::format("the file ends inside a token of {} bytes; it is cut, or data.token_dtype is "
                    "not {}",
                    byte_size(type),
                    data::name(type)));
  }
  source->open(config::DataFormat::nanogpt,
               0,
               static_cast<std::int64_t>(bytes.size() / byte_size(type)),
               type,
               end_of_text);
  return source;
}

}  // namespace moesaic::data
