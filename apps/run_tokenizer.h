#pragma once
#include <filesystem>
#include <memory>
#include <string>

#include "core/config/config.h"
#include "core/data/token_source.h"
#include "core/tokenizer/tokenizer.h"

// Which tokenizer made a run's tokens: checked when the run starts, kept in RUN_DIR/tokenizer, its hash in every checkpoint.
namespace moesaic::apps {

/// In the values of a checkpoint: the tokenizer's content hash, or kUnknownTokenizer.
inline constexpr const char* kTokenizerValue = "tokenizer";
inline constexpr const char* kUnknownTokenizer = "unknown";

/// The tokenizer of data.tokenizer (or its copy in the run's folder, where the original is gone), of text files (bytes), or null where
/// token files are all there is. Throws UsageError when it does not fit the model's vocabulary, the format of the data, or what the
/// data's .meta.json says it was made with; InputError when it cannot be read.
std::shared_ptr<const tokenizer::Tokenizer> tokenizer_of_data(const config::Config& config,
                                                              const data::TokenSource& train,
                                                              const data::TokenSource* valid);

/// Copies the files of data.tokenizer to RUN_DIR/tokenizer, unless that is where they are.
void keep_tokenizer(const config::Config& config);

/// Throws UsageError when `checkpoint` was trained on tokens of another tokenizer than the one with this content hash.
void require_same_tokenizer(const std::filesystem::path& checkpoint, const std::string& hash);

/// The tokenizer that a checkpoint was trained with: `given` (--tokenizer; may be empty), else the copy in its run's folder, else
/// data.tokenizer, else bytes. Throws UsageError when it is not the one of the checkpoint, or nobody knows.
std::shared_ptr<const tokenizer::Tokenizer> tokenizer_of_checkpoint(
    const std::filesystem::path& checkpoint,
    const config::Config& config,
    const std::string& given);

}  // namespace moesaic::apps
