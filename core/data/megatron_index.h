#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/data/token_type.h"

namespace moesaic::data {

/// A view of the bytes of a Megatron .idx file, checked as a whole when it is made. Little-endian: 9 bytes
/// "MMIDIDX\0\0"; u64 version = 1; u8 type (1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32, 8 u16); u64 S sequences;
/// u64 D entries of the document index; i32 lengths[S] (tokens); i64 offsets[S] (bytes in the .bin file); i64
/// documents[D] (first 0, last S); optionally i8 modes[S], which are skipped.
/// Document d is the sequences documents[d] … documents[d + 1]. Sequences lie in the .bin file without gaps, so a
/// document is one range of tokens.
class MegatronIndex {
 public:
  /// `bin_bytes`: size of the .bin file; the names go into messages. One pass over the index. Throws InputError
  /// (file:offset, found, allowed) unless every length, offset and document lies inside the files and in order.
  MegatronIndex(std::span<const std::byte> idx,
                std::uint64_t bin_bytes,
                const std::string& idx_name,
                const std::string& bin_name);

  TokenType type() const noexcept { return type_; }
  std::int64_t num_sequences() const noexcept { return sequences_; }
  std::int64_t num_documents() const noexcept { return entries_ - 1; }
  std::int64_t num_tokens() const noexcept { return tokens_; }
  bool has_modes() const noexcept { return has_modes_; }
  /// First token of a document in the .bin file; of num_documents(): the end.
  std::int64_t document_begin(std::int64_t document) const;
  std::int64_t document_length(std::int64_t document) const {
    return document_begin(document + 1) - document_begin(document);
  }

  static constexpr std::size_t kHeaderBytes = 34;

  /// Throws InputError unless the file begins as an index; says what else it seems to be.
  static void require_magic(std::span<const std::byte> idx, const std::string& idx_name);

 private:
  void read_header(const std::string& idx_name);
  void check_size(const std::string& idx_name);
  void check_sequences(std::uint64_t bin_bytes,
                       const std::string& idx_name,
                       const std::string& bin_name);
  void check_documents(const std::string& idx_name) const;
  std::size_t offsets_at() const noexcept;
  std::size_t documents_at() const noexcept;

  std::span<const std::byte> idx_;
  TokenType type_ = TokenType::u16;
  std::int64_t sequences_ = 0, entries_ = 0, tokens_ = 0;
  bool has_modes_ = false;
};

}  // namespace moesaic::data
