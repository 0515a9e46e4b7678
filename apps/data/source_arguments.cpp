#include "apps/data/source_arguments.h"

#include <algorithm>

#include <CLI/CLI.hpp>

namespace moesaic::apps {
namespace {

template <class E>
std::vector<std::string> words_of(E) {
  const auto names = config::names_of(E{});
  return {names.begin(), names.end()};
}

}  // namespace

data::FileOptions SourceArguments::options() const {
  data::FileOptions options;
  const auto names = config::names_of(config::DataFormat{});
  const auto it = std::find(names.begin(), names.end(), format);
  options.format = static_cast<config::DataFormat>(it - names.begin());
  if (vocab_size) options.vocab_size = *vocab_size;
  options.end_of_text = end_of_text;
  if (!tokenizer.empty()) options.tokenizer = tokenizer::open_tokenizer(tokenizer);
  options.raw_type = *data::token_type_of(token_dtype);
  return options;
}

void add_source_arguments(CLI::App& command, SourceArguments& arguments) {
  command.add_option("--format", arguments.format, "How the files are read, as data.format")
      ->check(CLI::IsMember(words_of(config::DataFormat{})))
      ->capture_default_str();
  command.add_option("--token-dtype", arguments.token_dtype, "Type of the tokens in nanogpt files")
      ->check(CLI::IsMember(words_of(config::TokenDtype{})))
      ->capture_default_str();
  command
      .add_option("--end-of-text",
                  arguments.end_of_text,
                  "The token that ends documents in llmc and nanogpt files")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 30));
  command
      .add_option("--vocab-size",
                  arguments.vocab_size,
                  "Every token id must be below; without it any will do")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{INT32_MAX}));
  command.add_option(
      "--tokenizer",
      arguments.tokenizer,
      "What turns conversations into tokens, and tokens into text: as data.tokenizer; bytes "
      "unless given");
}

}  // namespace moesaic::apps
