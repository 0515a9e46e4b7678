#include "core/data/mapped_tokens.h"

#include <utility>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/data/foreign_file.h"

namespace moesaic::data {

MappedTokens::MappedTokens(const std::string& path, std::int64_t vocab_size)
    : path_(path), file_(path, MappedFile::Links::follow), vocab_size_(vocab_size) {}

void MappedTokens::set_range(std::uint64_t begin, std::int64_t count, TokenType type) {
  MOESAIC_CHECK(begin <= file_.size() && count >= 0 &&
                    static_cast<std::uint64_t>(count) <= (file_.size() - begin) / byte_size(type),
                "tokens outside the file");
  begin_ = begin;
  count_ = count;
  type_ = type;
}

void MappedTokens::set_document_lookup(std::function<std::int64_t(std::int64_t)> lookup) {
  document_of_ = std::move(lookup);
}

const std::byte* MappedTokens::at(std::int64_t token) const {
  return file_.data() + begin_ + static_cast<std::uint64_t>(token) * byte_size(type_);
}

void MappedTokens::refuse(std::int64_t token, std::int64_t value) const {
  bad_file(path_,
           begin_ + static_cast<std::uint64_t>(token) * byte_size(type_),
           fmt::format("token id {} in document {}, allowed 0 to {} (model.vocab_size is {}); "
                       "the data was made by another tokenizer, or is of another type than {}",
                       value,
                       document_of_ ? document_of_(token) : 0,
                       vocab_size_ - 1,
                       vocab_size_,
                       data::name(type_)));
}

void MappedTokens::read(std::int64_t begin, std::span<std::int32_t> out) const {
  const auto count = static_cast<std::int64_t>(out.size());
  MOESAIC_CHECK(0 <= begin && count <= count_ && begin <= count_ - count,
                "tokens outside the file");
  if (const auto bad = decode_tokens(type_, at(begin), vocab_size_, out))
    refuse(begin + static_cast<std::int64_t>(bad->index), bad->value);
}

void MappedTokens::check_all() const {
  if (const auto bad = find_bad_token(type_, at(0), static_cast<std::size_t>(count_), vocab_size_))
    refuse(static_cast<std::int64_t>(bad->index), bad->value);
}

std::vector<std::int64_t> MappedTokens::ends_after(std::int64_t id) const {
  std::vector<std::int64_t> ends;
  find_ends(type_, at(0), static_cast<std::size_t>(count_), id, ends);
  return ends;
}

}  // namespace moesaic::data
