#include "apps/run_tokenizer.h"

#include <vector>

#include <fmt/format.h>

#include "core/base/durable_file.h"
#include "core/base/error.h"
#include "core/checkpoint/manifest.h"

namespace moesaic::apps {
namespace {

namespace fs = std::filesystem;
using tokenizer::Tokenizer;

constexpr const char* kFolder = "tokenizer";

fs::path copy_of_run(const fs::path& run) {
  return run / kFolder;
}

// data.tokenizer, or the copy that an earlier life of the run made.
std::string existing_spec(const config::Config& config) {
  const std::string& spec = *config.data.tokenizer;
  const fs::path copy = copy_of_run(config.run.dir);
  std::error_code error;
  return spec != "bytes" && !fs::exists(spec, error) && fs::is_directory(copy, error)
             ? copy.string()
             : spec;
}

void require_vocabulary(const Tokenizer& tokenizer, const config::Config& config) {
  if (tokenizer.vocab_size() <= config.model.vocab_size) return;
  throw UsageError(
      fmt::format("the tokenizer {} has ids up to {}; model.vocab_size is {}, and must "
                  "be at least {}",
                  tokenizer.name(),
                  tokenizer.vocab_size() - 1,
                  config.model.vocab_size,
                  tokenizer.vocab_size()));
}

void require_same_as_data(const Tokenizer& tokenizer, const data::TokenSource& source) {
  const data::SourceInfo& info = source.info();
  const bool bytes = tokenizer.content_hash() == "bytes";
  if (info.format == config::DataFormat::bytes_text && !bytes)
    throw UsageError(
        fmt::format("data.tokenizer is {}, but {} is text, which is read byte by byte; turn it "
                    "into tokens first "
                    "(moesaic data tokenize), or leave data.tokenizer out",
                    tokenizer.name(),
                    source.name()));
  if (!info.meta || info.meta->tokenizer_hash.empty() ||
      info.meta->tokenizer_hash == tokenizer.content_hash())
    return;
  throw UsageError(fmt::format("data.tokenizer is {} ({}), but {} was made with {} ({})",
                               tokenizer.name(),
                               tokenizer.content_hash(),
                               source.name(),
                               info.meta->tokenizer,
                               info.meta->tokenizer_hash));
}

// "" where the checkpoint says nothing: it is older than the value.
std::string saved_hash(const fs::path& checkpoint) {
  const auto texts = read_manifest(checkpoint).values.texts;
  const auto found = texts.find(kTokenizerValue);
  return found == texts.end() ? "" : found->second;
}

}  // namespace

std::shared_ptr<const Tokenizer> tokenizer_of_config(const config::Config& config) {
  if (!config.data.tokenizer) return nullptr;
  auto tokenizer = tokenizer::open_tokenizer(existing_spec(config));
  require_vocabulary(*tokenizer, config);
  return tokenizer;
}

std::shared_ptr<const Tokenizer> tokenizer_of_data(
    std::shared_ptr<const Tokenizer> configured,
    std::span<const data::TokenSource* const> sources) {
  bool bytes = true;
  for (const data::TokenSource* source : sources) {
    if (configured) require_same_as_data(*configured, *source);
    const data::SourceInfo info = source->info();
    bytes = bytes && (info.format == config::DataFormat::bytes_text ||
                      info.format == config::DataFormat::chat_jsonl ||
                      (info.meta && info.meta->tokenizer_hash == "bytes"));
  }
  if (configured) return configured;
  return bytes ? tokenizer::byte_tokenizer() : nullptr;
}

void keep_tokenizer(const config::Config& config) {
  if (!config.data.tokenizer) return;
  const fs::path folder = copy_of_run(config.run.dir);
  for (const auto& [file, name] : tokenizer::tokenizer_files(existing_spec(config))) {
    const fs::path copy = folder / name;
    std::error_code error;
    if (fs::equivalent(file, copy, error)) continue;
    create_folder(folder);
    replace_file(copy, MappedFile(file, MappedFile::Links::follow).text());
  }
}

void require_same_tokenizer(const fs::path& checkpoint, const std::string& hash) {
  const std::string saved = saved_hash(checkpoint);
  if (saved.empty() || saved == kUnknownTokenizer || hash == kUnknownTokenizer || saved == hash)
    return;
  throw UsageError(fmt::format(
      "{} was trained with another tokenizer: its content hash is {}, that of data.tokenizer is "
      "{}; "
      "set the tokenizer back (a copy is in the run's folder {}), or start anew in another run.dir",
      checkpoint.string(),
      saved,
      hash,
      kFolder));
}

std::shared_ptr<const Tokenizer> known_tokenizer_of_checkpoint(const fs::path& checkpoint,
                                                               const config::Config& config,
                                                               const std::string& given) {
  const std::string saved = saved_hash(checkpoint);
  const fs::path copy = copy_of_run(fs::absolute(checkpoint).parent_path().parent_path());
  std::string spec = given;
  if (spec.empty() && saved == "bytes") spec = saved;
  if (spec.empty() && fs::is_directory(copy)) spec = copy.string();
  if (spec.empty() && config.data.tokenizer) spec = *config.data.tokenizer;
  if (spec.empty() && saved.empty()) spec = "bytes";
  if (spec.empty()) return nullptr;
  auto tokenizer = tokenizer::open_tokenizer(spec);
  require_vocabulary(*tokenizer, config);
  if (!saved.empty() && saved != kUnknownTokenizer && saved != tokenizer->content_hash())
    throw UsageError(fmt::format(
        "{} was trained with another tokenizer: its content hash is {}, that of {} is {}",
        checkpoint.string(),
        saved,
        spec,
        tokenizer->content_hash()));
  return tokenizer;
}

std::shared_ptr<const Tokenizer> tokenizer_of_checkpoint(const fs::path& checkpoint,
                                                         const config::Config& config,
                                                         const std::string& given) {
  auto tokenizer = known_tokenizer_of_checkpoint(checkpoint, config, given);
  if (!tokenizer)
    throw UsageError(
        fmt::format("{} was trained on token files, and does not know their tokenizer; name it "
                    "with --tokenizer "
                    "(and set data.tokenizer when training)",
                    checkpoint.string()));
  return tokenizer;
}

}  // namespace moesaic::apps
