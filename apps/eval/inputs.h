#pragma once
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "apps/eval/choice_set.h"
#include "apps/eval/run_eval.h"
#include "apps/loaded_model.h"
#include "core/config/config.h"
#include "core/data/dataset.h"

namespace moesaic::apps::eval {

struct NamedPath {
  std::string name, path;
};
/// "NAME=PATH", or a path alone (also one with a '=' in it that exists), which is named after its file.
NamedPath named_path(const std::string& text);

struct DataInput {
  std::string name;
  std::unique_ptr<data::ValidationSet> windows;
  std::int64_t most_documents = 0;  ///< in a batch
};
struct ChoiceInput {
  std::unique_ptr<ChoiceSet> set;
  std::unique_ptr<PackedTexts> packed;
};

/// What is to be scored, opened and cut into batches for a model in `phase`.
struct Inputs {
  std::shared_ptr<const tokenizer::Tokenizer> tokenizer;  ///< null where nobody knows it
  std::vector<DataInput> data;
  std::vector<ChoiceInput> choices;
  /// What the batches look like.
  std::vector<LoadedModel::Window> windows(const Phase& phase) const;
};

/// Those that the arguments name; data.valid of the configuration when they name none. Throws UsageError when there is none
/// either, or for what does not fit the checkpoint's tokenizer; InputError for what cannot be read.
Inputs open_inputs(const EvalArguments& arguments,
                   const std::filesystem::path& checkpoint,
                   const config::Config& config,
                   const Phase& phase);

}  // namespace moesaic::apps::eval
