// moesaic data validate: whether data files are whole and fit a vocabulary.
#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "apps/data/commands.h"
#include "apps/data/progress.h"
#include "apps/data/source_arguments.h"
#include "apps/text_table.h"
#include "core/base/crc32c.h"
#include "core/base/durable_file.h"
#include "core/base/error.h"

namespace moesaic::apps {
namespace {

struct ValidateArguments {
  std::vector<std::string> paths;
  SourceArguments source;
  bool quick = false;
};

void check_file(const std::string& path, std::uint64_t bytes, std::uint32_t crc, bool quick) {
  const MappedFile file(path, MappedFile::Links::follow);
  if (file.size() != bytes) {
    throw InputError(
        fmt::format("{}:{}: the file ends here, but its description says {} bytes; copy it again",
                    path,
                    file.size(),
                    bytes));
  }
  if (quick) return;
  Progress progress("checksum of " + path, static_cast<std::int64_t>(bytes), "bytes");
  constexpr std::size_t kBlock = std::size_t{64} << 20;
  std::uint32_t found = 0;
  for (std::size_t at = 0; at < file.size(); at += kBlock) {
    const std::size_t n = std::min(kBlock, file.size() - at);
    found = crc32c(file.data() + at, n, found);
    progress.at(static_cast<std::int64_t>(at + n));
  }
  if (found != crc) {
    throw InputError(fmt::format(
        "{}: checksum crc32c {:08x}, allowed {:08x} (its description); the file was damaged "
        "or written by something else",
        path,
        found,
        crc));
  }
}

// One file or pair. Opening it has checked its structure, and every token of files up to 1 GiB.
void validate_file(const std::string& path, const ValidateArguments& arguments) {
  const data::FileOptions options = arguments.source.options();
  const auto source = data::open_file(path, options);
  const auto info = source->info();
  std::string checked = "sizes";
  if (info.meta) {
    const data::PairNames names = data::pair_names(path);
    check_file(names.idx, info.meta->idx_bytes, info.meta->idx_crc32c, arguments.quick);
    check_file(names.bin, info.meta->bin_bytes, info.meta->bin_crc32c, arguments.quick);
    if (!arguments.quick) checked += ", checksums";
  }
  if (!arguments.quick) {
    std::int64_t most = options.vocab_size;
    if (!arguments.source.vocab_size && info.meta && info.meta->vocab_size > 0) {
      most = info.meta->vocab_size;
      data::FileOptions narrow = options;
      narrow.vocab_size = most;
      data::open_file(path, narrow)->check_ids();
    } else {
      source->check_ids();
    }
    checked += most < INT32_MAX ? fmt::format(", every token id below {}", grouped(most))
                                : ", every token id below 2^31 (--vocab-size says more)";
  }
  std::cout << fmt::format("{}: fine: {} documents, {} tokens; checked: {}\n",
                           path,
                           grouped(source->num_documents()),
                           grouped(source->num_tokens()),
                           checked);
}

// All files, so that one run names everything that is wrong.
int validate(const ValidateArguments& arguments) {
  std::size_t bad = 0, files = 0;
  for (const std::string& path : arguments.paths) {
    for (const std::string& file : data::expand_path(path)) {
      ++files;
      try {
        validate_file(file, arguments);
      } catch (const InputError& error) {
        ++bad;
        std::cerr << error.what() << std::endl;
      }
    }
  }
  if (bad > 0) throw InputError(fmt::format("{} of {} files are not valid", bad, files));
  return 0;
}

}  // namespace

void add_data_validate(CLI::App& data, Action& action) {
  CLI::App* command = data.add_subcommand(
      "validate",
      "Check data files: structure, token ids, and checksums where a .meta.json has them");
  const auto arguments = std::make_shared<ValidateArguments>();
  command->add_option("PATH", arguments->paths, "Files, Megatron prefixes, folders or patterns")
      ->required();
  command->add_flag("--quick", arguments->quick, "Structure and sizes only: seconds for any size");
  add_source_arguments(*command, arguments->source);
  command->footer(
      "Example:\n  moesaic data validate tokens/web --vocab-size 163840\n"
      "Exit code 3 when a file is not valid; every such file is named.\n");
  command->callback(
      [&action, arguments] { action = [arguments] { return validate(*arguments); }; });
}

}  // namespace moesaic::apps
