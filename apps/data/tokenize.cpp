#include "core/data/tokenize.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "apps/data/commands.h"
#include "apps/data/source_arguments.h"
#include "apps/text_table.h"
#include "core/base/error.h"
#include "core/data/token_files.h"
#include "core/tokenizer/tokenizer.h"

namespace moesaic::apps {
namespace {

using Clock = std::chrono::steady_clock;
constexpr double kMega = 1e6;

struct TokenizeArguments {
  std::vector<std::string> inputs;
  std::string tokenizer, out;
  std::string format = "auto", json_key = "text";
  bool append_eod = true;
  std::string eod_token;
  std::string special_tokens = "parse", invalid_utf8 = "replace", long_documents;
  bool add_special_tokens = false, overwrite = false;
  std::int64_t max_document = std::int64_t{256} << 20;
  std::int64_t threads = 0;  // 0 = one per core
};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::vector<std::string> input_files(const std::vector<std::string>& inputs) {
  std::vector<std::string> files;
  for (const std::string& input : inputs) {
    if (input == "-") {
      files.push_back(input);
      continue;
    }
    for (std::string& file : data::expand_path(input))
      files.push_back(std::move(file));
  }
  return files;
}

// Bytes of all files; nothing where one is a pipe.
std::optional<std::int64_t> total_bytes(const std::vector<std::string>& files) {
  std::int64_t total = 0;
  for (const std::string& file : files) {
    std::error_code error;
    const auto size = std::filesystem::file_size(file, error);
    if (error) return {};
    total += static_cast<std::int64_t>(size);
  }
  return total;
}

std::optional<std::int32_t> end_of_text(const tokenizer::Tokenizer& tokenizer,
                                        const TokenizeArguments& a) {
  if (!a.append_eod) {
    if (!a.eod_token.empty())
      throw UsageError(
          "--eod-token names a token that --no-append-eod leaves out; drop one of them");
    return {};
  }
  std::optional<std::int32_t> id =
      a.eod_token.empty() ? tokenizer.end_of_text() : tokenizer.find(a.eod_token);
  if (id) return id;
  std::string names;
  int listed = 0;
  for (const auto& token : tokenizer.named_tokens()) {
    if (token.special && ++listed <= 20) names += "\n  " + token.text;
  }
  if (listed > 20) names += fmt::format("\n  … and {} more", listed - 20);
  throw UsageError(fmt::format(
      "{}; name one with --eod-token, or say --no-append-eod. Special tokens of {}:{}",
      a.eod_token.empty() ? "the tokenizer does not say which token ends a document"
                          : fmt::format("--eod-token \"{}\" is none of its tokens", a.eod_token),
      tokenizer.name(),
      names.empty() ? " none" : names));
}

std::string name_of_token(const tokenizer::Tokenizer& tokenizer, std::int32_t id) {
  for (const auto& token : tokenizer.named_tokens()) {
    if (token.id == id) return fmt::format("{} ({})", token.text, id);
  }
  return std::to_string(id);
}

// A line to standard error every few seconds, whether or not that is a terminal.
class Progress {
 public:
  explicit Progress(std::optional<std::int64_t> total) : total_(total) {}
  void operator()(const data::TokenizeStats& stats) {
    const double seconds = seconds_since(start_);
    if (seconds < next_) return;
    next_ = seconds + (seconds < 60 ? 5 : 30);
    const double done = static_cast<double>(stats.text_bytes);
    std::string line = fmt::format("tokenize | {:.1f} MB | {} documents | {} tokens | {:.1f} MB/s",
                                   done / kMega,
                                   grouped(stats.documents),
                                   grouped(stats.tokens),
                                   done / kMega / seconds);
    if (total_ && stats.bytes_read > 0) {
      const double part = static_cast<double>(stats.bytes_read) / static_cast<double>(*total_);
      const auto left = static_cast<std::int64_t>(seconds / part - seconds);
      line += fmt::format(" | {:.0f} % read | eta {}:{:02}:{:02}",
                          100 * part,
                          left / 3600,
                          left / 60 % 60,
                          left % 60);
    }
    std::cerr << line << std::endl;
  }

 private:
  std::optional<std::int64_t> total_;
  Clock::time_point start_ = Clock::now();
  double next_ = 5;
};

void print_summary(const TokenizeArguments& a,
                   const data::TokenizeStats& stats,
                   std::size_t files,
                   double seconds) {
  const double bytes = static_cast<double>(stats.text_bytes);
  std::cout << fmt::format(
      "documents  {} from {} file(s){}\n"
      "tokens     {} | {:.3f} bytes of text per token\n"
      "speed      {:.1f} s | {:.1f} MB/s with {} thread(s)\n",
      grouped(stats.documents),
      files,
      stats.empty_documents == 0
          ? ""
          : fmt::format(" | {} empty ones left out", grouped(stats.empty_documents)),
      grouped(stats.tokens),
      bytes / static_cast<double>(std::max<std::int64_t>(1, stats.tokens)),
      seconds,
      bytes / kMega / seconds,
      a.threads);
  if (stats.replaced > 0)
    std::cout << fmt::format(
        "warning    invalid UTF-8 in {} places became U+FFFD, first in the document at {}\n",
        grouped(stats.replaced),
        stats.first_replaced);
  std::cout << fmt::format("wrote      {0}.bin, {0}.idx, {0}.meta.json\n", a.out);
}

int run_tokenize(TokenizeArguments a) {
  const auto files = input_files(a.inputs);
  const auto tokenizer = tokenizer::open_tokenizer(a.tokenizer);
  const bool bytes = tokenizer->vocab_size() == 256 && tokenizer->content_hash() == "bytes";
  const auto end = end_of_text(*tokenizer, a);
  if (a.threads == 0) a.threads = std::max(1U, std::thread::hardware_concurrency());
  data::ReaderOptions reading;
  reading.format = a.format == "auto"    ? data::TextFormat::automatic
                   : a.format == "jsonl" ? data::TextFormat::jsonl
                                         : data::TextFormat::text;
  reading.json_key = a.json_key;
  reading.max_document = a.max_document;
  reading.piece = std::min(reading.piece, reading.max_document);
  // Bytes are the same tokens however a text is cut.
  reading.split_long = a.long_documents.empty() ? bytes : a.long_documents == "split";
  data::TokenizeOptions options;
  options.encode = {.parse_special = a.special_tokens == "parse",
                    .add_special = a.add_special_tokens};
  options.end_of_text = end;
  options.refuse_invalid_utf8 = a.invalid_utf8 == "refuse";
  options.threads = static_cast<int>(a.threads);
  std::cout << fmt::format("tokenizer  {} ({}) | vocabulary {} | {}\n",
                           tokenizer->name(),
                           tokenizer->content_hash(),
                           grouped(tokenizer->vocab_size()),
                           end ? "documents end with " + name_of_token(*tokenizer, *end)
                               : "no token ends documents")
            << std::flush;
  data::DocumentReader reader(files, reading);
  data::MegatronWriter writer(a.out,
                              {.vocab_size = tokenizer->vocab_size(),
                               .tokenizer = tokenizer->name(),
                               .tokenizer_hash = tokenizer->content_hash(),
                               .end_of_text = end,
                               .overwrite = a.overwrite});
  const auto start = Clock::now();
  Progress progress(total_bytes(files));
  const auto stats = data::tokenize(
      reader, *tokenizer, writer, options, [&](const data::TokenizeStats& s) { progress(s); });
  writer.finish();
  print_summary(a, stats, files.size(), seconds_since(start));
  return 0;
}

}  // namespace

void add_data_tokenize(CLI::App& data, Action& action) {
  CLI::App* command =
      data.add_subcommand("tokenize", "Turn text or JSONL files into a Megatron token file");
  const auto a = std::make_shared<TokenizeArguments>();
  command
      ->add_option(
          "INPUT",
          a->inputs,
          "Text (a line with a form feed alone separates documents) or JSONL files, folders, "
          "patterns; - = standard input")
      ->required();
  command
      ->add_option("--tokenizer",
                   a->tokenizer,
                   "bytes, a tokenizer.json, a tiktoken rank file, or a folder that holds one")
      ->required();
  command->add_option("--out", a->out, "Writes PREFIX.bin, PREFIX.idx and PREFIX.meta.json")
      ->type_name("PREFIX")
      ->required();
  command
      ->add_option("--format", a->format, "auto = JSONL where the name ends in .jsonl or .ndjson")
      ->check(CLI::IsMember(std::set<std::string>{"auto", "text", "jsonl"}))
      ->capture_default_str();
  command->add_option("--json-key", a->json_key, "The member that holds the text")
      ->capture_default_str();
  command->add_flag("--append-eod,!--no-append-eod",
                    a->append_eod,
                    "End every document with the end-of-text token (the default)");
  command->add_option("--eod-token",
                      a->eod_token,
                      "That token, where the tokenizer does not say or you want another");
  command
      ->add_option("--special-tokens",
                   a->special_tokens,
                   "What spells a special token: parse = is that token, text = is ordinary text")
      ->check(CLI::IsMember(std::set<std::string>{"parse", "text"}))
      ->capture_default_str();
  command->add_flag("--add-special-tokens",
                    a->add_special_tokens,
                    "Add what the tokenizer's post-processor puts around a text");
  command
      ->add_option(
          "--invalid-utf8", a->invalid_utf8, "replace = by U+FFFD, counted; refuse = an error")
      ->check(CLI::IsMember(std::set<std::string>{"replace", "refuse"}))
      ->capture_default_str();
  command
      ->add_option("--max-document", a->max_document, "Bytes of one document; 256MiB unless given")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30));
  command
      ->add_option(
          "--long-documents",
          a->long_documents,
          "Longer ones: refuse, or split = encode in pieces of 16 MiB (bytes: split, others: "
          "refuse unless given)")
      ->check(CLI::IsMember(std::set<std::string>{"refuse", "split"}));
  command->add_option("--threads", a->threads, "Threads that encode; 0 = one per core")
      ->check(CLI::Range(0, 256))
      ->capture_default_str();
  command->add_flag("--overwrite", a->overwrite, "Replace files of that name");
  command->footer(
      "Example:\n  moesaic data tokenize web/*.jsonl --tokenizer DeepSeek-V3/tokenizer.json --out "
      "tokens/web\n");
  command->callback([&action, a] { action = [a] { return run_tokenize(*a); }; });
}

}  // namespace moesaic::apps
