// moesaic data info: what is in data files.
#include <algorithm>
#include <array>
#include <bit>
#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "apps/data/commands.h"
#include "apps/data/source_arguments.h"
#include "apps/text_table.h"

namespace moesaic::apps {
namespace {

struct InfoArguments {
  std::vector<std::string> paths;
  SourceArguments source;
};

// Lengths of documents by powers of two: bucket b holds 2^(b-1) … 2^b - 1, bucket 0 the empty ones.
struct Lengths {
  std::array<std::int64_t, 65> documents{}, tokens{};
  std::int64_t least = INT64_MAX, most = 0;

  explicit Lengths(const data::TokenSource& source) {
    for (std::int64_t d = 0; d < source.num_documents(); ++d) {
      const std::int64_t length = source.document_length(d);
      const auto bucket =
          static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(length)));
      ++documents[bucket];
      tokens[bucket] += length;
      least = std::min(least, length);
      most = std::max(most, length);
    }
  }
};

void print_lengths(const data::TokenSource& source, std::ostream& out) {
  const Lengths lengths(source);
  const std::int64_t documents = source.num_documents(), tokens = source.num_tokens();
  out << fmt::format("  length     {} to {} tokens, mean {:.1f}\n",
                     grouped(lengths.least),
                     grouped(lengths.most),
                     static_cast<double>(tokens) / static_cast<double>(documents));
  const std::int64_t fullest =
      *std::max_element(lengths.documents.begin(), lengths.documents.end());
  out << fmt::format(
      "\n  {:>13} - {:<13} {:>13} {:>8} {:>8}\n", "tokens", "", "documents", "share", "tokens");
  for (std::size_t b = 0; b < lengths.documents.size(); ++b) {
    if (lengths.documents[b] == 0) continue;
    const std::int64_t low = b == 0 ? 0 : std::int64_t{1} << (b - 1);
    constexpr double kBar = 30;
    const auto bar = static_cast<std::size_t>(kBar * static_cast<double>(lengths.documents[b]) /
                                              static_cast<double>(fullest));
    out << fmt::format(
        "  {:>13} - {:<13} {:>13} {:>7.2f}% {:>7.2f}% {}\n",
        grouped(low),
        grouped(b == 0 ? 0 : 2 * low - 1),
        grouped(lengths.documents[b]),
        100 * static_cast<double>(lengths.documents[b]) / static_cast<double>(documents),
        100 * static_cast<double>(lengths.tokens[b]) / static_cast<double>(tokens),
        std::string(bar, '#'));
  }
}

void print_info(const std::string& path, const data::FileOptions& options, std::ostream& out) {
  const auto files = data::expand_path(path);
  const auto source = data::open_path(path, options);
  const data::SourceInfo info = source->info();
  out << fmt::format(
      "{}{}\n", path, files.size() > 1 ? fmt::format(" ({} files)", files.size()) : "");
  out << fmt::format(
      "  format     {}{}\n",
      info.format == config::DataFormat::automatic ? "several" : config::name_of(info.format),
      info.type.empty() ? "" : ", tokens " + info.type);
  out << fmt::format("  bytes      {}\n", grouped(static_cast<std::int64_t>(info.bytes)));
  out << fmt::format("  documents  {}\n", grouped(source->num_documents()));
  out << fmt::format("  tokens     {}\n", grouped(source->num_tokens()));
  if (info.end_of_text) out << fmt::format("  end        token {}\n", *info.end_of_text);
  if (info.meta) {
    out << fmt::format(
        "  tokenizer  {}{} | vocabulary {}\n",
        info.meta->tokenizer.empty() ? "not known" : info.meta->tokenizer,
        info.meta->tokenizer_hash.empty() ? "" : " (" + info.meta->tokenizer_hash + ")",
        grouped(info.meta->vocab_size));
  }
  print_lengths(*source, out);
}

int info(const InfoArguments& arguments) {
  for (std::size_t i = 0; i < arguments.paths.size(); ++i) {
    if (i > 0) std::cout << "\n";
    print_info(arguments.paths[i], arguments.source.options(), std::cout);
  }
  return 0;
}

}  // namespace

void add_data_info(CLI::App& data, Action& action) {
  CLI::App* command = data.add_subcommand(
      "info", "Format, documents, tokens and lengths of data files; nothing is written");
  const auto arguments = std::make_shared<InfoArguments>();
  command
      ->add_option(
          "PATH", arguments->paths, "Files, Megatron prefixes, folders or patterns, as data.train")
      ->required();
  add_source_arguments(*command, arguments->source);
  command->footer("Example:\n  moesaic data info data/train.txt tokens/web\n");
  command->callback([&action, arguments] { action = [arguments] { return info(*arguments); }; });
}

}  // namespace moesaic::apps
