// moesaic data merge: several data files as one Megatron pair.
#include <algorithm>
#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "apps/data/commands.h"
#include "apps/data/progress.h"
#include "apps/data/source_arguments.h"
#include "apps/text_table.h"
#include "core/base/error.h"
#include "core/data/megatron_writer.h"

namespace moesaic::apps {
namespace {

struct MergeArguments {
  std::string out;
  std::vector<std::string> paths;
  SourceArguments source;
  bool overwrite = false;
};

using Sources = std::vector<std::shared_ptr<const data::TokenSource>>;

data::TokenMeta meta_of(const data::TokenSource& source) {
  const data::SourceInfo info = source.info();
  if (info.meta) return *info.meta;
  data::TokenMeta meta;
  meta.end_of_text = info.end_of_text;
  if (info.format == config::DataFormat::bytes_text) {
    meta.tokenizer = "bytes";
    meta.vocab_size = data::kByteVocabulary;
  }
  return meta;
}

// What all files agree on; tokens of two tokenizers in one file would be noise.
data::MegatronWriter::Options options_for(const Sources& sources, const MergeArguments& arguments) {
  data::TokenMeta all = meta_of(*sources[0]);
  for (const auto& source : sources) {
    const data::TokenMeta meta = meta_of(*source);
    if (source->keeps_documents_whole()) {
      throw UsageError(
          fmt::format("{}: conversations have targets, which a Megatron file cannot hold; name the "
                      "file in data.train",
                      source->name()));
    }
    if (meta.tokenizer != all.tokenizer || meta.tokenizer_hash != all.tokenizer_hash) {
      throw UsageError(fmt::format("{} was made by tokenizer \"{}\" ({}), {} by \"{}\" ({})",
                                   source->name(),
                                   meta.tokenizer,
                                   meta.tokenizer_hash,
                                   sources[0]->name(),
                                   all.tokenizer,
                                   all.tokenizer_hash));
    }
    if (meta.end_of_text != all.end_of_text) all.end_of_text.reset();
    all.vocab_size =
        all.vocab_size == 0 || meta.vocab_size == 0 ? 0 : std::max(all.vocab_size, meta.vocab_size);
  }
  const std::int64_t vocab_size = arguments.source.vocab_size.value_or(all.vocab_size);
  if (vocab_size == 0) {
    throw UsageError(
        "the files do not say how large their vocabulary is, which decides the type of the tokens; "
        "say "
        "--vocab-size");
  }
  return {.vocab_size = vocab_size,
          .tokenizer = all.tokenizer,
          .tokenizer_hash = all.tokenizer_hash,
          .end_of_text = all.end_of_text,
          .overwrite = arguments.overwrite};
}

void copy(const data::TokenSource& source,
          std::int64_t document,
          std::vector<std::int32_t>& block,
          data::MegatronWriter& writer) {
  const std::int64_t length = source.document_length(document);
  const auto most = static_cast<std::int64_t>(block.size());
  for (std::int64_t at = 0; at < length; at += most) {
    const auto tokens =
        std::span(block).first(static_cast<std::size_t>(std::min(most, length - at)));
    source.read(document, at, tokens);
    writer.append(tokens);
  }
  writer.end_document();
}

int merge(const MergeArguments& arguments) {
  Sources sources;
  std::int64_t tokens = 0;
  data::FileOptions files = arguments.source.options();
  for (const std::string& path : arguments.paths) {
    for (const std::string& file : data::expand_path(path)) {
      if (data::pair_names(file).prefix == data::pair_names(arguments.out).prefix)
        throw UsageError(fmt::format("{} is both read and written", file));
      sources.push_back(data::open_file(file, files));
      tokens += sources.back()->num_tokens();
    }
  }
  const data::MegatronWriter::Options options = options_for(sources, arguments);
  if (!arguments.source.vocab_size) {  // the vocabulary is known now: every id is held against it
    files.vocab_size = options.vocab_size;
    for (auto& source : sources)
      source = data::open_file(source->name(), files);
  }
  data::MegatronWriter writer(data::pair_names(arguments.out).prefix, options);
  Progress progress("merge", tokens, "tokens");
  std::vector<std::int32_t> block(std::size_t{1} << 20);
  for (const auto& source : sources) {
    for (std::int64_t d = 0; d < source->num_documents(); ++d) {
      copy(*source, d, block, writer);
      progress.at(writer.num_tokens());
    }
  }
  const data::TokenMeta meta = writer.finish();
  std::cout << fmt::format("{}: {} documents, {} tokens ({}) from {} files\n",
                           data::pair_names(arguments.out).prefix,
                           grouped(meta.documents),
                           grouped(meta.tokens),
                           data::name(data::megatron_type(options.vocab_size)),
                           sources.size());
  return 0;
}

}  // namespace

void add_data_merge(CLI::App& data, Action& action) {
  CLI::App* command = data.add_subcommand(
      "merge", "Copy several data files, of any format, into one Megatron pair");
  const auto arguments = std::make_shared<MergeArguments>();
  command->add_option("OUT", arguments->out, "Prefix of OUT.bin, OUT.idx and OUT.meta.json")
      ->required();
  command->add_option("PATH", arguments->paths, "Files, Megatron prefixes, folders or patterns")
      ->required();
  command->add_flag("--overwrite", arguments->overwrite, "Replace an existing pair");
  add_source_arguments(*command, arguments->source);
  command->footer("Example:\n  moesaic data merge tokens/all tokens/web tokens/code\n");
  command->callback([&action, arguments] { action = [arguments] { return merge(*arguments); }; });
}

}  // namespace moesaic::apps
