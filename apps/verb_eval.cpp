#include <memory>

#include <CLI/CLI.hpp>

#include "apps/eval/run_eval.h"
#include "apps/verb.h"
#include "apps/whole_number.h"

namespace moesaic::apps {

void add_eval(CLI::App& app, Action& action) {
  CLI::App* verb = app.add_subcommand(
      "eval", "Loss and perplexity on data sets, and multiple choice, with a trained model");
  const auto a = std::make_shared<eval::EvalArguments>();
  verb->add_option("RUN", a->run, "run.dir of a training run, or one of its checkpoints (RUN@STEP)")
      ->required();
  verb->add_option("OVERRIDES",
                   a->overrides,
                   "Settings in place of those that the run was saved with: section.key=value")
      ->expected(0, -1);
  verb->add_option("--data",
                   a->data,
                   "NAME=PATH of a data set, as data.valid has them; may be given several times. "
                   "Without --data and --choices: the run's own data.valid")
      ->allow_extra_args(false);
  verb->add_option(
          "--choices",
          a->choices,
          "NAME=FILE of questions, a line each: {\"context\": …, \"choices\": [ … ], \"answer\": "
          "0}; may be given several times")
      ->allow_extra_args(false);
  verb->add_option("--tokens",
                   a->tokens,
                   "Tokens of each data set, in whole windows spread over it; 0 = all")
      ->check(whole_number, "NONNEGATIVE")
      ->capture_default_str();
  verb->add_option("--step", a->step, "Checkpoint of this step; 0 = the newest")
      ->check(whole_number, "NONNEGATIVE")
      ->capture_default_str();
  verb->add_flag("--average", a->average, "Use the moving averages of the weights");
  verb->add_flag("--json", a->json, "One JSON object in place of the lines");
  verb->add_option(
      "--details", a->details, "Write this file: a line of JSON for every question of --choices");
  verb->add_option(
      "--tokenizer",
      a->tokenizer,
      "Of a run that does not know it: bytes, a tokenizer.json, a rank file, or their folder");
  add_progress_argument(*verb,
                        a->console,
                        "How far loading and scoring are, on stderr: line: a line every 30 s; bar: "
                        "a bar in its place, for one process on a terminal; none: nothing; auto: "
                        "bar where it works");
  verb->footer(
      "Standard output holds the result and nothing else, once all is scored.\n"
      "With the run's experts.offload: full, experts that do not fit on the device wait in host "
      "memory and in the file; memory.device_budget, memory.host_budget, memory.file_budget, "
      "experts.device_cache and experts.policy say where, per rank.\n\n"
      "Example:\n  mpirun -np 2 moesaic eval runs/quickstart --data news=news.txt --choices "
      "quiz=quiz.jsonl\n");
  verb->callback([&action, a] { action = [a] { return eval::run_eval(*a); }; });
}

}  // namespace moesaic::apps
