#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/data/token_files.h"

namespace CLI {
class App;
}

namespace moesaic::apps {

/// The options that say how data files are read; the same words as the keys of section `data`.
struct SourceArguments {
  std::string format = "auto";
  std::string token_dtype = "u16";
  std::optional<std::int64_t> end_of_text;
  std::optional<std::int64_t> vocab_size;
  std::string tokenizer;

  data::FileOptions options() const;
};

/// Declares them; `arguments` must live until the action has run.
void add_source_arguments(CLI::App& command, SourceArguments& arguments);

}  // namespace moesaic::apps
