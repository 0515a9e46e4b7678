#pragma once
#include <filesystem>
#include <memory>
#include <span>
#include <string>

#include "core/config/config.h"
#include "core/data/token_source.h"
#include "core/tokenizer/tokenizer.h"

// Which tokenizer made a run's tokens: checked when the run starts, kept in RUN_DIR/tokenizer, its hash in every checkpoint.
namespace moesaic::apps {

/// In the values of a checkpoint: the tokenizer's content hash, or kUnknownTokenizer.
inline constexpr const char* kTokenizerValue = "tokenizer";
inline constexpr const char* kUnknownTokenizer = "unknown";

/// The tokenizer of data.tokenizer (or its copy in the run's folder, where the original is gone), or null without the key. Throws
/// UsageError when it does not fit the model's vocabulary, InputError when it cannot be read.
std::shared_ptr<const tokenizer::Tokenizer> tokenizer_of_config(const config::Config& config);

/// What made the tokens of all `sources`: `configured` where it is not null, bytes where they are text or say so, or null where token
/// files do not say. Throws UsageError when `configured` does not fit the format of the data, or what its .meta.json says it was
/// made with.
std::shared_ptr<const tokenizer::Tokenizer> tokenizer_of_data(
    std::shared_ptr<const tokenizer::Tokenizer> configured,
    std::span<const data::TokenSource* const> sources);

/// Copies the files of data.tokenizer to RUN_DIR/tokenizer, unless that is where they are.
void keep_tokenizer(const config::Config& config);

/// Throws UsageError when `checkpoint` was trained on tokens of another tokenizer than the one with this content hash.
void require_same_tokenizer(const std::filesystem::path& checkpoint, const std::string& hash);

/// The tokenizer that a checkpoint was trained with: `given` (--tokenizer; may be empty), else the copy in its run's folder, else
/// data.tokenizer, else bytes; null when nobody knows. Throws UsageError when it is not the one of the checkpoint.
std::shared_ptr<const tokenizer::Tokenizer> known_tokenizer_of_checkpoint(
    const std::filesystem::path& checkpoint,
    const config::Config& config,
    const std::string& given);

/// The same. Throws UsageError when nobody knows.
std::shared_ptr<const tokenizer::Tokenizer> tokenizer_of_checkpoint(
    const std::filesystem::path& checkpoint,
    const config::Config& config,
    const std::string& given);

}  // namespace moesaic::apps
