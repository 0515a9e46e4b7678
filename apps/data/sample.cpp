// moesaic data sample: documents or training samples, as tokens and as text.
#include <algorithm>
#include <iostream>
#include <memory>
#include <optional>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "apps/data/commands.h"
#include "apps/data/source_arguments.h"
#include "apps/text_table.h"
#include "core/base/error.h"
#include "core/base/random.h"
#include "core/data/dataset.h"
#include "core/data/permutation.h"

namespace moesaic::apps {
namespace {

struct SampleArguments {
  std::string path;
  SourceArguments source;
  std::int64_t number = 3;
  std::vector<std::int64_t> indices;
  std::int64_t length = 64;
  std::optional<std::int64_t> sequence_length;
  std::int64_t seed = 1;
};

using TokenizerPointer = std::shared_ptr<const tokenizer::Tokenizer>;

// What the tokens mean: --tokenizer, else bytes where the files say so; null where nobody knows.
TokenizerPointer tokenizer_of(const data::TokenSource& source, const data::FileOptions& options) {
  if (options.tokenizer) return options.tokenizer;
  const data::SourceInfo info = source.info();
  const bool bytes = info.format == config::DataFormat::bytes_text ||
                     info.format == config::DataFormat::chat_jsonl ||
                     (info.meta && info.meta->tokenizer == "bytes");
  return bytes ? tokenizer::byte_tokenizer() : nullptr;
}

// The text on one line, with quotes; bytes that are not UTF-8 become U+FFFD.
void print_tokens(std::span<const std::int32_t> tokens,
                  const TokenizerPointer& tokenizer,
                  const char* name,
                  std::ostream& out) {
  out << fmt::format("  {:<8} {}\n", name, fmt::join(tokens, " "));
  if (!tokenizer) return;
  const bool bytes = tokenizer->content_hash() == "bytes";  // whose end of a text has no text
  const nlohmann::json text(tokenizer->decode(tokens, bytes));
  out << fmt::format(
      "  {:<8} {}\n", "", text.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

// Numbers of `all` things: those asked for, or different ones drawn by the seed.
std::vector<std::int64_t> chosen(const SampleArguments& arguments,
                                 std::int64_t all,
                                 const char* what) {
  if (arguments.indices.empty()) {
    const data::KeyedPermutation order(
        all, mix64(hash_name("data sample") ^ static_cast<std::uint64_t>(arguments.seed)));
    std::vector<std::int64_t> numbers;
    for (std::int64_t i = 0; i < std::min(all, arguments.number); ++i)
      numbers.push_back(order(i));
    return numbers;
  }
  for (const std::int64_t i : arguments.indices) {
    if (i < 0 || i >= all)
      throw UsageError(
          fmt::format("--index {}: there are {} {}; allowed: 0 to {}", i, all, what, all - 1));
  }
  return arguments.indices;
}

void print_document(const data::TokenSource& source,
                    std::int64_t document,
                    std::int64_t length,
                    const TokenizerPointer& tokenizer,
                    std::ostream& out) {
  const std::int64_t all = source.document_length(document), shown = std::min(all, length);
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(shown));
  source.read(document, 0, tokens);
  out << fmt::format("document {}: {} tokens{}\n",
                     document,
                     grouped(all),
                     shown < all ? fmt::format(", the first {}", shown) : "");
  print_tokens(tokens, tokenizer, "tokens", out);
  if (!source.keeps_documents_whole()) return;
  std::vector<char> mask(tokens.size());
  source.read_targets(document, 0, mask);
  std::vector<std::int32_t> targets;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (mask[i] != 0) targets.push_back(tokens[i]);
  }
  print_tokens(targets, tokenizer, "targets", out);
}

void print_window(const data::PackedDataset& set,
                  std::int64_t sample,
                  const TokenizerPointer& tokenizer,
                  std::ostream& out) {
  const data::Batch batch = set.batch({sample, 1});
  out << fmt::format("sample {}: {} documents or parts of one, {} targets\n",
                     sample,
                     batch.cu.size() - 1,
                     batch.valid_labels);
  for (std::size_t d = 0; d + 1 < batch.cu.size(); ++d) {
    const auto begin = static_cast<std::size_t>(batch.cu[d]);
    const auto count = static_cast<std::size_t>(batch.cu[d + 1] - batch.cu[d]);
    print_tokens(std::span(batch.tokens).subspan(begin, count), tokenizer, "tokens", out);
  }
}

int sample(const SampleArguments& arguments) {
  const data::FileOptions options = arguments.source.options();
  const auto source = data::open_path(arguments.path, options);
  const TokenizerPointer tokenizer = tokenizer_of(*source, options);
  if (!arguments.sequence_length) {
    for (const std::int64_t d : chosen(arguments, source->num_documents(), "documents"))
      print_document(*source, d, arguments.length, tokenizer, std::cout);
    return 0;
  }
  const data::PackedDataset set(
      source, static_cast<std::uint64_t>(arguments.seed), 0, *arguments.sequence_length);
  for (const std::int64_t i : chosen(arguments, set.samples_per_epoch(), "samples in an epoch"))
    print_window(set, i, tokenizer, std::cout);
  return 0;
}

}  // namespace

void add_data_sample(CLI::App& data, Action& action) {
  CLI::App* command = data.add_subcommand(
      "sample", "Show documents, or samples as training cuts them: token ids and text");
  const auto arguments = std::make_shared<SampleArguments>();
  command->add_option("PATH", arguments->path, "A file, Megatron prefix, folder or pattern")
      ->required();
  command->add_option("-n,--number", arguments->number, "How many, drawn by --seed")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command->add_option("--index", arguments->indices, "These ones, from 0")->delimiter(',');
  command->add_option("--length", arguments->length, "Tokens shown of a document")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 24))
      ->capture_default_str();
  command
      ->add_option("--sequence-length",
                   arguments->sequence_length,
                   "Show samples of this many tokens of a first phase with run.seed = --seed")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 24));
  command->add_option("--seed", arguments->seed, "Which ones are drawn")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 53))
      ->capture_default_str();
  add_source_arguments(*command, arguments->source);
  command->footer("Example:\n  moesaic data sample tokens/web -n 2 --length 32\n");
  command->callback([&action, arguments] { action = [arguments] { return sample(*arguments); }; });
}

}  // namespace moesaic::apps
