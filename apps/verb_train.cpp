#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include "apps/launch.h"
#include "apps/train_run.h"
#include "apps/verb.h"
#include "core/config/load.h"

namespace moesaic::apps {
namespace {

struct TrainArguments {
  ConfigArguments config;
  std::string resume = "auto";
};

Resume resume_of(const std::string& text) {
  if (text == "must") return Resume::must;
  return text == "never" ? Resume::never : Resume::automatic;
}

int train(const TrainArguments& arguments) {
  catch_stop_signals();  // first of all: a signal during the start is not lost
  config::LoadedConfig loaded;
  const int problem = run_before_mpi(
      [&] { loaded = config::load_config(arguments.config.path, arguments.config.overrides); });
  if (problem != 0) return problem;
  CommOptions options;
  if (loaded.config.comm.reduction == config::ReductionOrder::library)
    options.reduction = Reduction::library;
  return run_ranks(options, [&](const RankPlace& place) {
    TrainRun run(loaded, resume_of(arguments.resume), place);
    return run.execute();
  });
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
          "auto: continue from the newest checkpoint of run.dir if there is one; must; never")
      ->check(CLI::IsMember({"auto", "must", "never"}))
      ->capture_default_str();
  verb->footer(
      "Example:\n  mpirun -np 2 moesaic train configs/quickstart.yaml train.steps=100 "
      "run.dir=runs/try\n");
  verb->callback([&action, arguments] { action = [arguments] { return train(*arguments); }; });
}

}  // namespace moesaic::apps
