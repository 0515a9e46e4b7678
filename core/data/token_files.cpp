#include "core/data/token_files.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <set>

#include <fmt/format.h>
#include <glob.h>

#include "core/base/error.h"
#include "core/data/chat_source.h"
#include "core/data/foreign_file.h"
#include "core/data/joined_source.h"
#include "core/data/llmc_header.h"
#include "core/data/megatron_source.h"
#include "core/data/raw_source.h"

namespace moesaic::data {
namespace {

namespace fs = std::filesystem;
using config::DataFormat;

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() > end.size() && text.ends_with(end);
}

std::string without(const std::string& text, const std::string& end) {
  return text.substr(0, text.size() - end.size());
}

// An index stands for its pair, so that .bin and .idx do not count twice.
std::vector<std::string> files_of_folder(const std::string& folder) {
  std::set<std::string> names;
  std::error_code error;
  const fs::directory_iterator entries(folder, error);
  if (error) throw InputError(fmt::format("{}: cannot be listed: {}", folder, error.message()));
  for (const auto& entry : entries) {
    const std::string path = entry.path().string();
    if (!entry.is_regular_file(error) || entry.path().filename().string().starts_with("."))
      continue;
    if (ends_with(path, ".idx"))
      names.insert(without(path, ".idx"));
    else if (ends_with(path, ".bin"))
      names.insert(fs::exists(without(path, ".bin") + ".idx") ? without(path, ".bin") : path);
    else if (ends_with(path, ".jsonl") || ends_with(path, ".txt"))
      names.insert(path);
  }
  if (names.empty()) {
    throw InputError(
        fmt::format("{}: a folder without data files; allowed are files that end in .idx and .bin, "
                    ".bin, .jsonl "
                    "or .txt (folders in it are not looked at)",
                    folder));
  }
  return {names.begin(), names.end()};
}

std::vector<std::string> matches_of(const std::string& pattern) {
  glob_t found{};
  const int result = ::glob(pattern.c_str(), 0, nullptr, &found);
  std::set<std::string> names;
  for (std::size_t i = 0; result == 0 && i < found.gl_pathc; ++i) {
    const std::string path = found.gl_pathv[i];
    if (ends_with(path, ".idx"))
      names.insert(without(path, ".idx"));
    else if (ends_with(path, ".bin") && fs::exists(without(path, ".bin") + ".idx"))
      names.insert(without(path, ".bin"));
    else if (!ends_with(path, ".meta.json"))
      names.insert(path);
  }
  ::globfree(&found);
  if (names.empty()) throw InputError(fmt::format("{}: no file matches this pattern", pattern));
  return {names.begin(), names.end()};
}

std::vector<std::byte> first_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::array<char, 64> buffer;
  file.read(buffer.data(), buffer.size());
  const auto* begin = reinterpret_cast<const std::byte*>(buffer.data());
  return {begin, begin + file.gcount()};
}

}  // namespace

PairNames pair_names(const std::string& path) {
  std::string prefix = path;
  for (const char* end : {".bin", ".idx"}) {
    if (ends_with(path, end)) prefix = without(path, end);
  }
  return {prefix, prefix + ".bin", prefix + ".idx", prefix + ".meta.json"};
}

std::vector<std::string> expand_path(const std::string& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) return files_of_folder(path);
  if (path.find_first_of("*?[") != std::string::npos && !fs::exists(path, error))
    return matches_of(path);
  return {path};
}

DataFormat format_of_file(const std::string& path, DataFormat format) {
  if (format != DataFormat::automatic) return format;
  std::error_code error;
  if (ends_with(path, ".jsonl")) return DataFormat::chat_jsonl;
  if (ends_with(path, ".idx")) return DataFormat::megatron;
  if (!fs::exists(path, error) && fs::exists(path + ".idx", error)) return DataFormat::megatron;
  if (!ends_with(path, ".bin")) return DataFormat::bytes_text;
  if (fs::exists(pair_names(path).idx, error)) return DataFormat::megatron;
  const std::vector<std::byte> start = first_bytes(path);
  if (has_llmc_magic(start)) return DataFormat::llmc;
  if (!fs::exists(path, error))
    throw InputError(fmt::format("{}: cannot open: No such file", path));
  const std::string kind = looks_like(start);
  throw InputError(fmt::format(
      "{}: a .bin file without {} beside it and without a header of llm.c{}; for raw tokens set "
      "data.format: nanogpt (and data.token_dtype), for a Megatron pair copy its .idx too",
      path,
      pair_names(path).idx,
      kind.empty() ? "" : ". This is " + kind));
}

std::unique_ptr<TokenSource> open_file(const std::string& path, const FileOptions& options) {
  switch (format_of_file(path, options.format)) {
    case DataFormat::megatron:
      return open_megatron(path, options.vocab_size);
    case DataFormat::llmc:
      return open_llmc(path, options.vocab_size, options.end_of_text);
    case DataFormat::nanogpt:
      return open_raw(path, options.vocab_size, options.end_of_text, options.raw_type);
    case DataFormat::chat_jsonl:
      return open_chat(path,
                       options.vocab_size,
                       options.tokenizer ? *options.tokenizer : *tokenizer::byte_tokenizer());
    case DataFormat::automatic:
    case DataFormat::bytes_text:
      break;
  }
  std::error_code error;
  if (!fs::exists(path, error) && fs::exists(path + ".idx", error))
    throw InputError(fmt::format(
        "{}: there is no such file but a Megatron pair, {}.bin and .idx, and data.format says "
        "bytes_text; leave data.format out, or set it to megatron",
        path,
        path));
  return open_text(path, options.vocab_size);
}

std::shared_ptr<const TokenSource> open_path(const std::string& path, const FileOptions& options) {
  std::vector<std::shared_ptr<const TokenSource>> sources;
  for (const std::string& file : expand_path(path))
    sources.push_back(open_file(file, options));
  return join_sources(std::move(sources));
}

}  // namespace moesaic::data
