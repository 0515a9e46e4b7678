#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "apps/plan_pipeline.h"
#include "apps/plan_recompute.h"
#include "apps/plan_report.h"
#include "apps/verb.h"
#include "core/config/check.h"
#include "core/config/load.h"
#include "core/config/scalar.h"
#include "core/model/pipeline_plan.h"
#include "core/model/plan.h"

namespace moesaic::apps {
namespace {

// No sequence is longer.
constexpr std::int64_t kMostDocument = std::int64_t{1} << 30;

struct PlanArguments {
  ConfigArguments config;
  bool json = false;
  bool effective = false;
  std::optional<std::string> device_memory;  ///< a size with its unit
  std::int64_t least_document = kPlannedDocument;
  std::optional<ScheduleForm> schedule;
};

std::optional<std::int64_t> budget_of(const PlanArguments& arguments) {
  if (!arguments.device_memory) return std::nullopt;
  const std::string& text = *arguments.device_memory;
  const auto bytes = config::parse_bytes(text);
  if (!bytes.value)
    throw UsageError(
        fmt::format("--device-memory {}: {}",
                    text,
                    bytes.error.empty() ? "is no size; write for example 80GiB" : bytes.error));
  if (*bytes.value <= 0)
    throw UsageError(fmt::format(
        "--device-memory {}: a device has more than that; write for example 80GiB", text));
  return bytes.value;
}

int plan(const PlanArguments& arguments) {
  const std::optional<std::int64_t> budget = budget_of(arguments);
  const config::LoadedConfig loaded =
      config::load_config(arguments.config.path, arguments.config.overrides);
  const ModelPlan result = make_plan(loaded.config);
  std::vector<config::Problem> problems;
  for (const auto& findings : {result.findings, pipeline_findings(loaded.config)}) {
    for (const config::Finding& finding : findings)
      problems.push_back(config::located(loaded, finding));
  }
  if (!problems.empty()) throw config::ConfigError(problems);
  if (arguments.effective) {
    std::cout << config::effective_yaml(loaded);
    return 0;
  }
  const auto pipeline = make_pipeline_plan(loaded.config, result);
  if (arguments.schedule) {
    if (!pipeline)
      throw UsageError(
          "--schedule: parallel.pp is 1, so there is no pipeline; try parallel.pp=4, or "
          "parallel.order=vertical");
    std::cout << schedule_text(*pipeline, *arguments.schedule);
    return 0;
  }
  MemoryLimits limits{.device_key = "--device-memory"};
  if (budget) limits.device = static_cast<std::uint64_t>(*budget);
  std::vector<MemoryPlan> stages;
  std::optional<ResourceError> too_little;  // for what is offloaded; said behind what can be said
  try {
    stages = plan_stages(loaded.config, limits, arguments.least_document);
  } catch (const ResourceError& e) {
    too_little = e;
    stages = plan_stages(loaded.config, {.least_caches = true}, arguments.least_document);
  }
  const auto recompute = plan_recompute(loaded.config, arguments.least_document);
  std::cout << (arguments.json ? plan_json(loaded, result, stages, recompute, pipeline)
                               : plan_text(loaded,
                                           result,
                                           stages,
                                           recompute_text(recompute, budget),
                                           pipeline,
                                           arguments.least_document,
                                           too_little.has_value()));
  if (too_little) throw *too_little;
  return 0;
}

}  // namespace

void add_plan(CLI::App& app, Action& action) {
  CLI::App* verb = app.add_subcommand(
      "plan", "Check a configuration and show what it costs; needs no GPU and no MPI");
  const auto arguments = std::make_shared<PlanArguments>();
  add_config_arguments(*verb, arguments->config);
  CLI::Option* json =
      verb->add_flag("--json", arguments->json, "Print JSON with plain integers instead of tables");
  verb->add_option("--device-memory",
                   arguments->device_memory,
                   "Say which activations.recompute fits a device of this size and computes least "
                   "again, and give offloaded experts what the rest leaves of it, as in 80GiB");
  verb->add_option("--least-document",
                   arguments->least_document,
                   "Tokens that every document has at least. Kernels need memory per document; a "
                   "run looks at its data")
      ->check(CLI::Range(std::int64_t{1}, kMostDocument))
      ->capture_default_str();
  verb->add_flag("--effective",
                 arguments->effective,
                 "Print every key with its value and where it came from instead")
      ->excludes(json);
  const std::map<std::string, ScheduleForm> forms{
      {"grid", ScheduleForm::grid}, {"csv", ScheduleForm::csv}, {"json", ScheduleForm::json}};
  verb->add_option("--schedule",
                   arguments->schedule,
                   "Print the whole pipeline schedule instead (parallel.pp above 1): grid, csv or "
                   "json")
      ->transform(CLI::CheckedTransformer(forms).description(""))
      ->excludes(json)
      ->excludes("--effective");
  verb->footer(
      "Example:\n"
      "  moesaic plan configs/kimi_linear_48b.yaml data.sequence_length=131072\n"
      "  moesaic plan configs/bench/hybrid_5b.yaml --device-memory 90GiB\n"
      "  moesaic plan configs/bench/hybrid_5b.yaml experts.offload=full --device-memory 40GiB\n"
      "  moesaic plan configs/bench/hybrid_5b_long.yaml --least-document 262144\n"
      "  moesaic plan configs/kimi_k3.yaml parallel.pp=8 parallel.schedule=zero_bubble\n");
  verb->callback([&action, arguments] { action = [arguments] { return plan(*arguments); }; });
}

}  // namespace moesaic::apps
