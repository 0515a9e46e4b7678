#include "apps/eval/inputs.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "apps/run_tokenizer.h"
#include "core/base/error.h"
#include "core/data/document_bound.h"
#include "core/data/open_data.h"

namespace moesaic::apps::eval {
namespace {

namespace fs = std::filesystem;
using Source = std::shared_ptr<const data::TokenSource>;

void require_different(const std::vector<NamedPath>& paths, const char* option) {
  std::set<std::string> names;
  for (const NamedPath& p : paths) {
    if (!names.insert(p.name).second)
      throw UsageError(
          fmt::format("{}: two are named {}; give names: {} NAME=PATH", option, p.name, option));
  }
}

std::vector<NamedPath> named_paths(const std::vector<std::string>& texts, const char* option) {
  std::vector<NamedPath> paths;
  for (const std::string& text : texts) {
    const NamedPath& p = paths.emplace_back(named_path(text));
    if (p.path.empty() || p.path[0] == '=')
      throw UsageError(fmt::format("{} {}: expected NAME=PATH, or PATH alone", option, text));
  }
  require_different(paths, option);
  return paths;
}

// Text that another tokenizer should have made into tokens would give figures that mean nothing.
void require_fit(const Inputs& inputs, const NamedPath& p, const Source& source) {
  const data::TokenSource* const sources[] = {source.get()};
  if (inputs.tokenizer) {
    tokenizer_of_data(inputs.tokenizer, sources);
    return;
  }
  const auto format = source->info().format;
  if (format == config::DataFormat::bytes_text || format == config::DataFormat::chat_jsonl)
    throw UsageError(
        fmt::format("--data {}: this is text, and the run does not know which tokenizer made its "
                    "tokens; name it with --tokenizer",
                    p.path));
}

DataInput input_of(const std::string& name,
                   Source source,
                   const Phase& phase,
                   std::int64_t tokens) {
  DataInput input;
  input.name = name;
  input.most_documents =
      data::DocumentBound(*source).in(phase.micro_batch_size, phase.sequence_length);
  const std::int64_t samples = tokens > 0
                                   ? std::max<std::int64_t>(1, tokens / phase.sequence_length)
                                   : std::numeric_limits<std::int64_t>::max();
  input.windows =
      std::make_unique<data::ValidationSet>(std::move(source), phase.sequence_length, samples);
  return input;
}

}  // namespace

NamedPath named_path(const std::string& text) {
  std::error_code error;
  const auto at = text.find('=');
  const bool has_name =
      at != std::string::npos && at > 0 && text.find('/') > at && !fs::exists(text, error);
  if (has_name) return {text.substr(0, at), text.substr(at + 1)};
  fs::path path(text);
  if (!path.has_filename()) path = path.parent_path();  // a folder with a slash behind it
  const std::string stem = path.stem().string();
  const bool plain = !stem.empty() && stem.find_first_of("*?[") == std::string::npos;
  return {plain ? stem : text, text};
}

std::vector<LoadedModel::Window> Inputs::windows(const Phase& phase) const {
  std::vector<LoadedModel::Window> all;
  for (const DataInput& d : data) {
    all.push_back({.tokens = phase.micro_batch_tokens(),
                   .longest = phase.sequence_length,
                   .documents = d.most_documents});
  }
  for (const ChoiceInput& c : choices) {
    const std::int64_t tokens = c.packed->batch_tokens();
    all.push_back({.tokens = tokens,
                   .longest = std::min(tokens, phase.sequence_length),
                   .documents = c.packed->most_documents()});
  }
  return all;
}

Inputs open_inputs(const EvalArguments& arguments,
                   const fs::path& checkpoint,
                   const config::Config& config,
                   const Phase& phase) {
  Inputs inputs;
  inputs.tokenizer = arguments.choices.empty()
                         ? known_tokenizer_of_checkpoint(checkpoint, config, arguments.tokenizer)
                         : tokenizer_of_checkpoint(checkpoint, config, arguments.tokenizer);
  for (const NamedPath& p : named_paths(arguments.data, "--data")) {
    const config::DataFileConfig entry{.path = p.path, .weight = {}, .format = {}};
    const Source source = data::open_tokens({entry}, config, inputs.tokenizer);
    require_fit(inputs, p, source);
    inputs.data.push_back(input_of(p.name, source, phase, arguments.tokens));
  }
  for (const NamedPath& p : named_paths(arguments.choices, "--choices")) {
    ChoiceInput& input = inputs.choices.emplace_back();
    input.set =
        std::make_unique<ChoiceSet>(p.name, p.path, *inputs.tokenizer, phase.sequence_length);
    input.packed = std::make_unique<PackedTexts>(input.set->texts(), phase.micro_batch_tokens());
  }
  if (!inputs.data.empty() || !inputs.choices.empty()) return inputs;
  if (config.data.valid.empty())
    throw UsageError(
        "this run has no data.valid; give --data NAME=PATH or --choices NAME=FILE.jsonl");
  inputs.data.push_back(input_of("valid",
                                 data::open_tokens(config.data.valid, config, inputs.tokenizer),
                                 phase,
                                 arguments.tokens));
  return inputs;
}

}  // namespace moesaic::apps::eval
