#include "core/tokenizer/tokenizer.h"

#include <cerrno>
#include <cstring>
#include <fstream>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/base/json_value.h"
#include "core/tokenizer/unicode.h"
#include "core/tokenizer/utf8.h"

namespace moesaic::tokenizer {
namespace {

namespace fs = std::filesystem;

constexpr const char *kJsonName = "tokenizer.json", *kRankName = "tiktoken.model",
                     *kConfigName = "tokenizer_config.json";

std::string read_file(const fs::path& path) {
  std::error_code error;
  const auto size = fs::file_size(path, error);
  if (error)
    throw InputError(fmt::format("{}: cannot be read: {}", path.string(), error.message()));
  if (size > JsonLimits{}.max_bytes)
    throw InputError(fmt::format("{}: {} bytes; no tokenizer file has more than {}",
                                 path.string(),
                                 size,
                                 JsonLimits{}.max_bytes));
  std::ifstream file(path, std::ios::binary);
  std::string text(size, '\0');
  if (!file.read(text.data(), static_cast<std::streamsize>(size)))
    throw InputError(fmt::format("{}: cannot be read: {}", path.string(), std::strerror(errno)));
  return text;
}

// The file that names a tokenizer: `spec`, or what a folder holds.
fs::path main_file(const std::string& spec) {
  const fs::path path(spec);
  if (!fs::is_directory(path)) {
    if (!fs::exists(path))
      throw InputError(fmt::format(
          "{}: no such tokenizer; give 'bytes', a tokenizer.json, a tiktoken rank file (*.model, "
          "*.tiktoken), or a folder that holds one",
          spec));
    return path;
  }
  for (const char* name : {kJsonName, kRankName}) {
    if (fs::exists(path / name)) return path / name;
  }
  throw InputError(fmt::format("{}: holds neither tokenizer.json nor tiktoken.model", spec));
}

bool is_rank_file(const fs::path& path) {
  return path.extension() == ".model" || path.extension() == ".tiktoken";
}

}  // namespace

std::vector<std::int32_t> Tokenizer::encode(std::string_view text,
                                            const EncodeOptions& options) const {
  std::vector<std::int32_t> ids;
  encoder(options)->encode(text, ids);
  return ids;
}

std::optional<std::int32_t> Tokenizer::find(std::string_view text) const {
  for (const NamedToken& token : named_tokens()) {
    if (token.text == text) return token.id;
  }
  return {};
}

std::vector<TokenizerFile> tokenizer_files(const std::string& spec) {
  if (spec == "bytes") return {};
  const fs::path main = main_file(spec), config = main.parent_path() / kConfigName;
  std::vector<TokenizerFile> files{{main, is_rank_file(main) ? kRankName : kJsonName}};
  if (fs::exists(config)) files.push_back({config, kConfigName});
  return files;
}

std::shared_ptr<const Tokenizer> open_tokenizer(const std::string& spec) {
  if (spec == "bytes") return byte_tokenizer();
  require_unicode_libraries();
  const auto files = tokenizer_files(spec);
  const std::string config = files.size() > 1 ? read_file(files[1].path) : "";
  const std::string text = read_file(files[0].path);
  if (is_rank_file(files[0].path)) return parse_rank_file(text, config, files[0].path.string());
  return parse_tokenizer_json(text, config, files[0].path.string());
}

// Holds back at most the three bytes that may begin a character.
std::string StreamDecoder::push(std::int32_t id) {
  try {
    pending_ += tokenizer_.decode({&id, 1});
  } catch (const InputError&) {  // a vocabulary may have gaps, which an untrained model draws
    pending_ += kReplacement;
  }
  std::string out;
  std::size_t at = 0;
  while (at < pending_.size()) {
    const Utf8Step step = utf8_step(pending_, at);
    if (step.cut_short) break;
    out += step.valid ? std::string_view(pending_).substr(at, step.bytes) : kReplacement;
    at += step.bytes;
  }
  pending_.erase(0, at);
  return out;
}

std::string StreamDecoder::finish() {
  const std::string out(pending_.empty() ? "" : kReplacement);
  pending_.clear();
  return out;
}

}  // namespace moesaic::tokenizer
