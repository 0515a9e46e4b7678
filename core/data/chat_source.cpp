#include "core/data/chat_source.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "core/base/activity.h"
#include "core/base/durable_file.h"
#include "core/base/error.h"
#include "core/data/chat_record.h"
#include "core/data/foreign_file.h"

namespace moesaic::data {
namespace {

struct Encoders {
  std::unique_ptr<tokenizer::Encoder> marks, text;
};

class ChatSource final : public TokenSource {
 public:
  ChatSource(const std::string& path,
             std::int64_t vocab_size,
             const tokenizer::Tokenizer& tokenizer)
      : path_(path), vocab_size_(vocab_size), end_of_text_(tokenizer.end_of_text()) {
    const Encoders encoders{tokenizer.encoder({.parse_special = true, .add_special = false}),
                            tokenizer.encoder({.parse_special = false, .add_special = false})};
    const MappedFile file(path, MappedFile::Links::follow);
    bytes_ = file.size();
    const std::string kind = looks_like({file.data(), file.size()});
    if (!kind.empty() && kind != "a text file")
      bad_file(path, 0, "not a JSONL file: this is " + kind);
    const std::string_view text = file.text();
    std::int64_t line = 1;
    for (std::size_t at = 0; at < text.size(); ++line) {
      const std::size_t end = std::min(text.find('\n', at), text.size());
      const std::string_view record = text.substr(at, end - at);
      if (record.find_first_not_of(" \t\r") != std::string_view::npos)
        add(record, fmt::format("{}:{}: line {}", path, at, line), encoders);
      at = end + 1;
    }
    if (num_documents() == 0) throw InputError(fmt::format("{}: no records", path));
  }

  std::int64_t num_documents() const noexcept override {
    return static_cast<std::int64_t>(begin_.size()) - 1;
  }
  std::int64_t document_length(std::int64_t document) const override {
    const auto d = static_cast<std::size_t>(document);
    return begin_[d + 1] - begin_[d];
  }
  void read(std::int64_t document, std::int64_t begin, std::span<std::int32_t> out) const override {
    const std::size_t at = place(document, begin, out.size());
    std::copy_n(tokens_.begin() + static_cast<std::ptrdiff_t>(at), out.size(), out.begin());
  }
  void read_targets(std::int64_t document, std::int64_t begin, std::span<char> out) const override {
    const std::size_t at = place(document, begin, out.size());
    std::copy_n(targets_.begin() + static_cast<std::ptrdiff_t>(at), out.size(), out.begin());
  }
  bool keeps_documents_whole() const noexcept override { return true; }
  const std::string& name() const noexcept override { return path_; }
  std::int64_t num_tokens() const override { return static_cast<std::int64_t>(tokens_.size()); }
  SourceInfo info() const override {
    return {.format = config::DataFormat::chat_jsonl,
            .type = "",
            .bytes = bytes_,
            .end_of_text = end_of_text_,
            .meta = std::nullopt};
  }

 private:
  std::size_t place(std::int64_t document, std::int64_t begin, std::size_t count) const {
    MOESAIC_CHECK(0 <= document && document < num_documents() && begin >= 0 &&
                      begin + static_cast<std::int64_t>(count) <= document_length(document),
                  "tokens outside the document");
    return static_cast<std::size_t>(begin_[static_cast<std::size_t>(document)] + begin);
  }

  void add(std::string_view record, const std::string& where, const Encoders& encoders) {
    count_progress();
    bool last_is_target = false;
    for (const ChatPiece& piece : parse_chat_record(record, where)) {
      std::vector<std::int32_t> tokens;
      try {
        (piece.is_mark ? *encoders.marks : *encoders.text).encode(piece.text, tokens);
      } catch (const InputError& error) {
        throw InputError(fmt::format("{}: {}", where, error.what()));
      }
      append(tokens, piece.is_target, where);
      last_is_target = piece.is_target;
    }
    if (end_of_text_) append({*end_of_text_}, last_is_target, where);
    begin_.push_back(static_cast<std::int64_t>(tokens_.size()));
  }

  void append(const std::vector<std::int32_t>& tokens, bool is_target, const std::string& where) {
    for (const std::int32_t token : tokens) {
      if (token < 0 || token >= vocab_size_) {
        throw InputError(fmt::format(
            "{}: token id {} is not below model.vocab_size = {}", where, token, vocab_size_));
      }
    }
    tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
    targets_.insert(targets_.end(), tokens.size(), is_target ? char{1} : char{0});
  }

  std::string path_;
  std::int64_t vocab_size_;
  std::optional<std::int32_t> end_of_text_;
  std::uint64_t bytes_ = 0;
  std::vector<std::int32_t> tokens_;
  std::vector<char> targets_;
  std::vector<std::int64_t> begin_{0};  // of each document, and the end
};

}  // namespace

std::unique_ptr<TokenSource> open_chat(const std::string& path,
                                       std::int64_t vocab_size,
                                       const tokenizer::Tokenizer& tokenizer) {
  return std::make_unique<ChatSource>(path, vocab_size, tokenizer);
}

}  // namespace moesaic::data
