#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "core/data/token_meta.h"
#include "core/data/token_type.h"

namespace moesaic::data {

/// The type that Megatron's tools write for a vocabulary: u16 below 65,500 ids, else i32.
TokenType megatron_type(std::int64_t vocab_size) noexcept;

/// Writes PREFIX.bin, PREFIX.idx and PREFIX.meta.json document by document, in memory that does not grow with their number.
/// Everything goes to files PREFIX.*.tmp first; finish() makes them durable and gives them their names, the index
/// last, so that a pair with an index is complete. Destroyed without finish(), it removes the .tmp files. A kill leaves
/// them behind; the next writer replaces them. Throws ResourceError (path, cause) when a file cannot be written.
class MegatronWriter {
 public:
  struct Options {
    std::int64_t vocab_size = 0;  ///< 1 … 2^31 - 1; decides the type
    std::string tokenizer;
    std::string tokenizer_hash;
    std::optional<std::int64_t> end_of_text;
    bool overwrite = false;  ///< replace an existing pair, else UsageError
  };
  MegatronWriter(std::filesystem::path prefix, Options options);
  ~MegatronWriter();
  MegatronWriter(const MegatronWriter&) = delete;
  MegatronWriter& operator=(const MegatronWriter&) = delete;

  /// Adds tokens to the open document. Ids are in [0, vocab_size); the end-of-text token is the caller's to add.
  void append(std::span<const std::int32_t> tokens);
  /// Closes the open document; it may be empty.
  void end_document();
  /// append() and end_document().
  void add_document(std::span<const std::int32_t> tokens) {
    append(tokens);
    end_document();
  }
  std::int64_t num_documents() const noexcept;
  std::int64_t num_tokens() const noexcept;
  /// Closes and names the files. At least one document with a token must have been added, else InputError.
  TokenMeta finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::data
