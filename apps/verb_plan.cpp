#include <iostream>
#include <memory>
#include <vector>

#include <CLI/CLI.hpp>

#include "apps/plan_report.h"
#include "apps/verb.h"
#include "core/config/load.h"
#include "core/model/plan.h"

namespace moesaic::apps {
namespace {

struct PlanArguments {
  ConfigArguments config;
  bool json = false;
  bool effective = false;
};

int plan(const PlanArguments& arguments) {
  const config::LoadedConfig loaded = config::load_config(arguments.config.path, arguments.config.overrides);
  const ModelPlan result = make_plan(loaded.config);
  std::vector<config::Problem> problems;
  for (const config::Finding& finding : result.findings) problems.push_back(config::located(loaded, finding));
  if (!problems.empty()) throw config::ConfigError(problems);
  if (arguments.effective) {
    std::cout << config::effective_yaml(loaded);
  } else {
    std::cout << (arguments.json ? plan_json(loaded, result) : plan_text(loaded, result));
  }
  return 0;
}

}  // namespace

void add_plan(CLI::App& app, Action& action) {
  CLI::App* verb = app.add_subcommand("plan", "Check a configuration and show what it costs; needs no GPU and no MPI");
  const auto arguments = std::make_shared<PlanArguments>();
  add_config_arguments(*verb, arguments->config);
  CLI::Option* json = verb->add_flag("--json", arguments->json, "Print JSON with plain integers instead of tables");
  verb->add_flag("--effective", arguments->effective, "Print every key with its value and where it came from instead")->excludes(json);
  verb->footer(
      "Example:\n"
      "  moesaic plan configs/kimi_linear_48b.yaml data.sequence_length=131072\n");
  verb->callback([&action, arguments] { action = [arguments] { return plan(*arguments); }; });
}

}  // namespace moesaic::apps
