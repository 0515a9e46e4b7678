#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/base/durable_file.h"
#include "core/data/token_type.h"

namespace moesaic::data {

/// A mapped file whose bytes from `begin` on are `count` token ids of one type.
class MappedTokens {
 public:
  /// The range must lie inside the file. `vocab_size`: ids must be below.
  MappedTokens(const std::string& path, std::int64_t vocab_size);
  void set_range(std::uint64_t begin, std::int64_t count, TokenType type);
  /// For messages: the document that a token of the file belongs to.
  void set_document_lookup(std::function<std::int64_t(std::int64_t token)> lookup);

  const std::string& path() const noexcept { return path_; }
  std::span<const std::byte> bytes() const noexcept { return {file_.data(), file_.size()}; }
  std::int64_t count() const noexcept { return count_; }
  TokenType type() const noexcept { return type_; }
  std::int64_t vocab_size() const noexcept { return vocab_size_; }

  /// Reads tokens [at, at + out.size()). Throws InputError "file:offset: …" for an id that is not below the vocabulary.
  void read(std::int64_t at, std::span<std::int32_t> out) const;
  /// The first such id of all, as read() would throw it.
  void check_all() const;
  /// Where the documents end that a token with this id closes.
  std::vector<std::int64_t> ends_after(std::int64_t id) const;

 private:
  [[noreturn]] void refuse(std::int64_t token, std::int64_t value) const;
  const std::byte* at(std::int64_t token) const;
  std::string path_;
  MappedFile file_;
  std::int64_t vocab_size_;
  std::uint64_t begin_ = 0;
  std::int64_t count_ = 0;
  TokenType type_ = TokenType::u16;
  std::function<std::int64_t(std::int64_t)> document_of_;
};

}  // namespace moesaic::data
