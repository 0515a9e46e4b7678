#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "apps/train_run.h"
#include "apps/verb.h"
#include "core/checkpoint/checkpoint.h"
#include "core/config/load.h"

namespace moesaic::apps {
namespace {

struct TrainArguments {
  ConfigArguments config;
  std::string run_dir;
  std::string resume = "auto";
  bool fallback = false;
  ConsoleArguments console;
};

int train(const TrainArguments& a) {
  return run_training([&] { return config::load_config(a.config.path, a.config.overrides); },
                      a.resume,
                      a.fallback,
                      a.console);
}

// The configuration that the newest checkpoint was saved with, and what the command line changes in it.
config::LoadedConfig saved_config(const TrainArguments& a) {
  if (!std::filesystem::is_directory(a.run_dir))
    throw InputError(
        fmt::format("{} is not a folder; give the run.dir of a training run", a.run_dir));
  const auto root = std::filesystem::path(a.run_dir) / "checkpoints";
  std::optional<std::filesystem::path> checkpoint;
  if (a.fallback) {
    if (const auto all = list_checkpoints(root); !all.empty()) checkpoint = all.back().path;
  } else if (const auto latest = latest_checkpoint(root)) {
    checkpoint = latest->path;
  }
  if (!checkpoint) throw InputError(fmt::format("{} holds no complete checkpoint", root.string()));
  std::vector<std::string> overrides = a.config.overrides;
  for (const std::string& o : overrides) {
    if (o.starts_with("run.dir="))
      throw UsageError(fmt::format(
          "resume continues in {}; to go on elsewhere: moesaic train CONFIG run.dir=… --resume={}",
          a.run_dir,
          a.run_dir));
  }
  overrides.push_back("run.dir=" + a.run_dir);
  return config::load_config_text(checkpoint_config(*checkpoint),
                                  (*checkpoint / "manifest.json").string() + " (config)",
                                  overrides);
}

int resume(const TrainArguments& a) {
  return run_training([&] { return saved_config(a); }, "must", a.fallback, a.console);
}

void add_fallback(CLI::App& verb, TrainArguments& arguments) {
  verb.add_flag("--fallback",
                arguments.fallback,
                "Pass over damaged checkpoints, saying so, instead of ending with exit code 3");
}

}  // namespace

void add_train(CLI::App& app, Action& action) {
  CLI::App* verb =
      app.add_subcommand("train", "Train a model; start it with mpirun for several ranks");
  const auto arguments = std::make_shared<TrainArguments>();
  add_config_arguments(*verb, arguments->config);
  verb->add_option(
          "--resume",
          arguments->resume,
          "auto: continue from the newest checkpoint of run.dir if there is one; must; never; or "
          "PATH[@STEP]: from this checkpoint of this or another run")
      ->capture_default_str();
  add_fallback(*verb, *arguments);
  add_console_arguments(*verb, arguments->console);
  verb->footer(
      "Example:\n  mpirun -np 2 moesaic train configs/quickstart.yaml train.steps=100 "
      "run.dir=runs/try\n");
  verb->callback([&action, arguments] { action = [arguments] { return train(*arguments); }; });
}

void add_resume(CLI::App& app, Action& action) {
  CLI::App* verb =
      app.add_subcommand("resume", "Continue a run with the configuration that it was saved with");
  const auto arguments = std::make_shared<TrainArguments>();
  verb->add_option("RUN_DIR", arguments->run_dir, "run.dir of a training run")->required();
  verb->add_option("OVERRIDES",
                   arguments->config.overrides,
                   "Settings that change from here on: section.key=value; each is printed, old and "
                   "new, and refused where it would not fit")
      ->expected(0, -1);
  add_fallback(*verb, *arguments);
  add_console_arguments(*verb, arguments->console);
  verb->footer("Example:\n  mpirun -np 2 moesaic resume runs/try train.steps=2000\n");
  verb->callback([&action, arguments] { action = [arguments] { return resume(*arguments); }; });
}

}  // namespace moesaic::apps
