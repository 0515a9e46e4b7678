#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "apps/checkpoint_config.h"
#include "apps/checkpoint_path.h"
#include "apps/generator.h"
#include "apps/number_range.h"
#include "apps/run_tokenizer.h"
#include "apps/verb.h"
#include "apps/whole_number.h"

namespace moesaic::apps {
namespace {

struct GenerateArguments {
  std::string run;
  std::vector<std::string> overrides;
  std::string prompt = "The ";
  std::int64_t step = 0;  ///< 0 = the newest
  std::int64_t max_new_tokens = 200;
  SamplingOptions sampling;
  bool average = false;
  std::string tokenizer;
};

int generate(const GenerateArguments& arguments) {
  const auto checkpoint = find_checkpoint(arguments.run, arguments.step);
  const CheckpointConfig saved = load_checkpoint_config(checkpoint, arguments.overrides);
  const config::Config& config = saved.loaded.config;
  if (arguments.average && !config.optimizer.ema_decay)
    throw UsageError("--average: this run kept no averages; set optimizer.ema_decay when training");
  const auto tokenizer = tokenizer_of_checkpoint(checkpoint, config, arguments.tokenizer);
  std::optional<Generator> generator;
  load_with_changes(saved.changes,
                    [&] { generator.emplace(config, checkpoint, arguments.average); });
  std::cerr << text_of_tiers(generator->memory()) << std::flush;
  const auto tokens = tokenizer->encode(arguments.prompt);
  if (tokens.empty()) throw UsageError("--prompt is empty; give at least one character");
  std::cout << arguments.prompt << std::flush;
  SamplingOptions sampling = arguments.sampling;
  sampling.vocabulary = tokenizer->vocab_size();
  tokenizer::StreamDecoder text(*tokenizer);
  generator->generate(tokens, arguments.max_new_tokens, sampling, [&](std::int32_t token) {
    if (token == tokenizer->end_of_text()) return false;
    std::cout << text.push(token) << std::flush;
    return true;
  });
  std::cout << text.finish() << std::endl;
  return 0;
}

}  // namespace

void add_generate(CLI::App& app, Action& action) {
  CLI::App* verb = app.add_subcommand("generate", "Continue a text with a trained model");
  const auto a = std::make_shared<GenerateArguments>();
  verb->add_option("RUN", a->run, "run.dir of a training run, or one of its checkpoints (RUN@STEP)")
      ->required();
  verb->add_option("OVERRIDES",
                   a->overrides,
                   "Settings in place of those that the run was saved with: section.key=value")
      ->expected(0, -1);
  verb->add_option("--prompt", a->prompt, "Text to continue")->capture_default_str();
  verb->add_option("--max-new-tokens", a->max_new_tokens, "Stop after this many tokens")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40))
      ->capture_default_str();
  verb->add_option("--temperature", a->sampling.temperature, "0 = always the most likely token")
      ->check(number_in(0.0, 100.0), "in [0 - 100]")
      ->capture_default_str();
  verb->add_option("--top-k", a->sampling.top_k, "Sample among the k most likely tokens; 0 = all")
      ->check(whole_number, "NONNEGATIVE")
      ->capture_default_str();
  verb->add_option("--seed", a->sampling.seed, "The same seed gives the same text")
      ->check(whole_number, "NONNEGATIVE")
      ->capture_default_str();
  verb->add_option("--step", a->step, "Checkpoint of this step; 0 = the newest")
      ->check(whole_number, "NONNEGATIVE")
      ->capture_default_str();
  verb->add_option(
      "--tokenizer",
      a->tokenizer,
      "Of a run that does not know it: bytes, a tokenizer.json, a rank file, or their folder");
  verb->add_flag("--average", a->average, "Use the moving averages of the weights");
  verb->footer(
      "With the run's experts.offload: full, experts that do not fit on the device wait in host "
      "memory and in the file; memory.device_budget, memory.host_budget, memory.file_budget, "
      "experts.device_cache and experts.policy say where.\n"
      "Example:\n  moesaic generate runs/quickstart --prompt \"The \" --max-new-tokens 200\n");
  verb->callback([&action, a] { action = [a] { return generate(*a); }; });
}

}  // namespace moesaic::apps
