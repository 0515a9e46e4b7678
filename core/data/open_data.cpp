#include "core/data/open_data.h"

#include <utility>

#include "core/data/joined_source.h"
#include "core/data/token_files.h"

namespace moesaic::data {

std::shared_ptr<const TokenSource> open_tokens(const std::vector<config::DataFileConfig>& entries,
                                               const config::Config& config,
                                               const TokenizerPointer& tokenizer) {
  FileOptions options{.format = config.data.format,
                      .vocab_size = config.model.vocab_size,
                      .end_of_text = config.data.end_of_text,
                      .tokenizer = tokenizer,
                      .raw_type = config.data.token_dtype == config::TokenDtype::u16
                                      ? TokenType::u16
                                      : TokenType::u32};
  std::vector<std::shared_ptr<const TokenSource>> sources;
  for (const auto& entry : entries) {
    options.format = entry.format.value_or(config.data.format);
    sources.push_back(open_path(entry.path, options));
  }
  return join_sources(std::move(sources));
}

Blend open_training_data(const config::Config& config, const TokenizerPointer& tokenizer) {
  const auto& entries = config.data.train;
  if (!entries.front().weight) return Blend(open_tokens(entries, config, tokenizer));
  std::vector<WeightedSource> sets;
  for (const auto& entry : entries)
    sets.push_back({open_tokens({entry}, config, tokenizer), *entry.weight});
  return Blend(std::move(sets));
}

}  // namespace moesaic::data
