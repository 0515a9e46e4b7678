#include "core/data/megatron_index.h"

#include <cstring>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/data/foreign_file.h"

namespace moesaic::data {
namespace {

constexpr char kMagic[] = "MMIDIDX\0";  // and the zero that ends the literal: 9 bytes
constexpr std::size_t kMagicBytes = sizeof(kMagic);
static_assert(kMagicBytes == 9);

template <class T>
T load(std::span<const std::byte> bytes, std::size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

bool token_type_of_code(std::uint8_t code, TokenType& type) {
  switch (code) {
    case 1:
      type = TokenType::u8;
      return true;
    case 2:
      type = TokenType::i8;
      return true;
    case 3:
      type = TokenType::i16;
      return true;
    case 4:
      type = TokenType::i32;
      return true;
    case 5:
      type = TokenType::i64;
      return true;
    case 8:
      type = TokenType::u16;
      return true;
    default:
      return false;
  }
}

}  // namespace

MegatronIndex::MegatronIndex(std::span<const std::byte> idx,
                             std::uint64_t bin_bytes,
                             const std::string& idx_name,
                             const std::string& bin_name)
    : idx_(idx) {
  read_header(idx_name);
  check_size(idx_name);
  check_documents(idx_name);
  check_sequences(bin_bytes, idx_name, bin_name);
}

void MegatronIndex::require_magic(std::span<const std::byte> idx, const std::string& idx_name) {
  if (idx.size() >= kMagicBytes && std::memcmp(idx.data(), kMagic, kMagicBytes) == 0) return;
  const std::string kind = looks_like(idx);
  bad_file(idx_name,
           0,
           fmt::format("not a Megatron index: magic {}, allowed \"MMIDIDX\\0\\0\"{}",
                       idx.empty() ? "missing" : shown_bytes(idx),
                       kind.empty() ? "" : "; this is " + kind));
}

void MegatronIndex::read_header(const std::string& idx_name) {
  require_magic(idx_, idx_name);
  if (idx_.size() < kHeaderBytes) {
    bad_file(
        idx_name,
        idx_.size(),
        fmt::format("the file ends inside the header of {} bytes; copy it again", kHeaderBytes));
  }
  const auto version = load<std::uint64_t>(idx_, 9);
  if (version != 1) {
    bad_file(idx_name,
             9,
             version == std::uint64_t{1} << 56
                 ? "version 1 in big-endian byte order; allowed: little-endian files"
                 : fmt::format("version {}, allowed 1", version));
  }
  const auto code = load<std::uint8_t>(idx_, 17);
  if (!token_type_of_code(code, type_)) {
    bad_file(
        idx_name,
        17,
        code == 6 || code == 7
            ? fmt::format("type code {} ({}): tokens are integers; allowed: 1 u8, 2 i8, 3 i16, "
                          "4 i32, 5 i64, 8 u16",
                          code,
                          code == 6 ? "f64" : "f32")
            : fmt::format("unknown type code {}, allowed: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 "
                          "u16",
                          code));
  }
}

// The counts come from the file: they are compared with its size before anything is computed from them.
void MegatronIndex::check_size(const std::string& idx_name) {
  const auto sequences = load<std::uint64_t>(idx_, 18), entries = load<std::uint64_t>(idx_, 26);
  const std::uint64_t size = idx_.size();
  if (sequences > size / 12 || entries > size / 8) {
    bad_file(idx_name,
             sequences > size / 12 ? 18 : 26,
             fmt::format("{} sequences and {} entries of the document index do not fit into the "
                         "file of {} bytes; it is damaged or cut",
                         sequences,
                         entries,
                         size));
  }
  const std::uint64_t plain = kHeaderBytes + 12 * sequences + 8 * entries;
  has_modes_ = sequences > 0 && size == plain + sequences;
  if (size != plain && !has_modes_) {
    bad_file(idx_name,
             size,
             fmt::format("the file ends here, but {} sequences and {} entries of the document "
                         "index need {} bytes (or {} with modes); copy it again",
                         sequences,
                         entries,
                         plain,
                         plain + sequences));
  }
  if (sequences == 0) bad_file(idx_name, 18, "0 sequences: there is no data");
  if (entries < 2) {
    bad_file(
        idx_name,
        26,
        fmt::format("{} entries of the document index, allowed at least 2 (0 and the number of "
                    "sequences)",
                    entries));
  }
  sequences_ = static_cast<std::int64_t>(sequences);
  entries_ = static_cast<std::int64_t>(entries);
}

std::size_t MegatronIndex::offsets_at() const noexcept {
  return kHeaderBytes + 4 * static_cast<std::size_t>(sequences_);
}
std::size_t MegatronIndex::documents_at() const noexcept {
  return kHeaderBytes + 12 * static_cast<std::size_t>(sequences_);
}

void MegatronIndex::check_sequences(std::uint64_t bin_bytes,
                                    const std::string& idx_name,
                                    const std::string& bin_name) {
  const std::size_t size = byte_size(type_);
  std::uint64_t expected = 0;
  for (std::int64_t s = 0; s < sequences_; ++s) {
    const std::size_t length_at = kHeaderBytes + 4 * static_cast<std::size_t>(s),
                      offset_at = offsets_at() + 8 * static_cast<std::size_t>(s);
    const auto length = load<std::int32_t>(idx_, length_at);
    const auto offset = load<std::int64_t>(idx_, offset_at);
    if (length < 0) {
      bad_file(idx_name,
               length_at,
               fmt::format("length {} of sequence {}, allowed 0 or more", length, s));
    }
    if (offset < 0 || static_cast<std::uint64_t>(offset) != expected) {
      bad_file(idx_name,
               offset_at,
               fmt::format("offset {} of sequence {}, allowed {} (the end of the one before)",
                           offset,
                           s,
                           expected));
    }
    // Fewer than 2^31 tokens of 8 bytes in fewer than 2^60 sequences: far below 2^64 before the comparison stops it.
    expected += static_cast<std::uint64_t>(length) * size;
    if (expected > bin_bytes) {
      bad_file(bin_name,
               bin_bytes,
               fmt::format("the file ends here, but sequence {} of {} reaches to byte {}; the data "
                           "file is cut or of another index",
                           s,
                           idx_name,
                           expected));
    }
  }
  if (expected != bin_bytes) {
    bad_file(
        bin_name,
        expected,
        fmt::format("the last sequence of {} ends here, but the file has {} bytes; the index is "
                    "of other data",
                    idx_name,
                    bin_bytes));
  }
  tokens_ = static_cast<std::int64_t>(expected / size);
  if (tokens_ == 0) bad_file(idx_name, kHeaderBytes, "all sequences are empty: there is no data");
}

void MegatronIndex::check_documents(const std::string& idx_name) const {
  std::int64_t before = 0;
  for (std::int64_t d = 0; d < entries_; ++d) {
    const std::size_t at = documents_at() + 8 * static_cast<std::size_t>(d);
    const auto sequence = load<std::int64_t>(idx_, at);
    const bool fits = d == 0              ? sequence == 0
                      : d == entries_ - 1 ? sequence == sequences_ && sequence >= before
                                          : sequence >= before && sequence <= sequences_;
    if (!fits) {
      bad_file(idx_name,
               at,
               fmt::format("entry {} of the document index is {}, allowed {}",
                           d,
                           sequence,
                           d == 0              ? "0"
                           : d == entries_ - 1 ? fmt::format("{} (all sequences)", sequences_)
                                               : fmt::format("{} to {}", before, sequences_)));
    }
    before = sequence;
  }
}

std::int64_t MegatronIndex::document_begin(std::int64_t document) const {
  MOESAIC_CHECK(0 <= document && document < entries_, "no such document");
  const auto sequence =
      load<std::int64_t>(idx_, documents_at() + 8 * static_cast<std::size_t>(document));
  if (sequence == sequences_) return tokens_;
  return load<std::int64_t>(idx_, offsets_at() + 8 * static_cast<std::size_t>(sequence)) /
         static_cast<std::int64_t>(byte_size(type_));
}

}  // namespace moesaic::data
