#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/config/enums.h"
#include "core/data/token_source.h"
#include "core/data/token_type.h"
#include "core/tokenizer/tokenizer.h"

namespace moesaic::data {

/// How data files are read.
struct FileOptions {
  config::DataFormat format = config::DataFormat::automatic;
  /// Ids must be below. Checked for a whole file when it is opened, up to kScannedBytes, and for every token that is read.
  std::int64_t vocab_size = INT32_MAX;
  /// Closes documents in files without a table of them (llmc, nanogpt).
  std::optional<std::int64_t> end_of_text;
  /// chat_jsonl; null = bytes.
  std::shared_ptr<const tokenizer::Tokenizer> tokenizer;
  /// nanogpt, which has no header.
  TokenType raw_type = TokenType::u16;

  static constexpr std::uint64_t kScannedBytes = std::uint64_t{1} << 30;
};

/// The files that a path stands for, in sorted order: itself; the data files of a folder (.idx with its .bin, .bin, .jsonl,
/// .txt; not of folders in it); the matches of a pattern with * ? [ ]. A Megatron pair is named by its prefix. Throws
/// InputError when there is none.
std::vector<std::string> expand_path(const std::string& path);

/// How a file will be read: `format`, or for `automatic` what its extension and first bytes say. Throws InputError, naming
/// what to write, for a .bin file without index and magic.
config::DataFormat format_of_file(const std::string& path, config::DataFormat format);

/// Opens one file, or a Megatron pair by prefix, .idx or .bin. Throws InputError (file:offset) for what is not valid.
std::unique_ptr<TokenSource> open_file(const std::string& path, const FileOptions& options);

/// All files of a path as one source.
std::shared_ptr<const TokenSource> open_path(const std::string& path, const FileOptions& options);

/// The sides of a Megatron pair.
struct PairNames {
  std::string prefix, bin, idx, meta;
};
PairNames pair_names(const std::string& path);

}  // namespace moesaic::data
