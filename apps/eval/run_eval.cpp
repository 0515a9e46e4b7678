#include "apps/eval/run_eval.h"

#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <vector>

#include <fmt/format.h>

#include "apps/checkpoint_config.h"
#include "apps/checkpoint_path.h"
#include "apps/eval/inputs.h"
#include "apps/eval/report.h"
#include "apps/launch.h"
#include "apps/memory_shortages.h"
#include "core/base/durable_file.h"
#include "core/checkpoint/checkpoint.h"
#include "core/checkpoint/manifest.h"
#include "core/config/load.h"
#include "core/train/sinks/console.h"

namespace moesaic::apps::eval {
namespace {

namespace fs = std::filesystem;

// Only what --details wrote is replaced by it: a slip of the pen must not cost the questions, or a file of the run.
void require_details_or_nothing(const fs::path& path) {
  std::error_code error;
  if (!fs::is_regular_file(path, error) || fs::file_size(path, error) == 0) return;
  std::ifstream file(path, std::ios::binary);
  std::string line;
  std::getline(file, line);
  if (line.find("\"logp\"") == std::string::npos)
    throw UsageError(fmt::format(
        "--details {}: is there and was not written by --details; name another file, or remove it",
        path.string()));
}

/// One evaluation, from the point of view of one rank.
class Evaluation {
 public:
  Evaluation(const EvalArguments& arguments,
             const fs::path& checkpoint,
             const config::Config& config,
             const std::vector<ConfigChange>& changes,
             const RankPlace& place,
             const ConsoleStyle& style)
      : arguments_(arguments),
        checkpoint_(checkpoint),
        config_(config),
        changes_(changes),
        place_(place) {
    if (!is_root() || !style.step_lines) return;
    // Standard output holds the result alone.
    Console::Options options;
    options.lines = &std::cerr;
    options.bar = style.bar ? &std::cerr : nullptr;
    options.columns = style.columns;
    progress_.add(std::make_unique<Console>(options));
  }

  int execute() {
    const Device device = resolve_device(config_, &place_.world);
    const Phase phase = phase_of_checkpoint(config_, read_manifest(checkpoint_).step);
    const Inputs inputs = open_inputs(arguments_, checkpoint_, config_, phase);
    std::optional<DurableFile> details;  // a path that cannot be written is known before the work
    if (is_root() && !arguments_.details.empty()) {
      require_details_or_nothing(arguments_.details);
      details.emplace(arguments_.details, DurableFile::Mode::replace);
    }
    const auto model = load(device, inputs.windows(phase));
    EvalResult result{.checkpoint = checkpoint_,
                      .step = model->step(),
                      .average = arguments_.average,
                      .device = device.kind == Device::Kind::cuda ? "cuda" : "cpu",
                      .precision = name(model->precision().compute),
                      .window = phase.sequence_length,
                      .data = {},
                      .choices = {}};
    score(*model, inputs, phase, result);
    if (details) {
      details->write(details_of(result));
      details->finish();
    }
    if (!is_root()) return 0;
    if (arguments_.json)
      std::cout << to_json(result) << std::endl;
    else
      print_text(result, std::cout);
    return 0;
  }

 private:
  bool is_root() const { return place_.world.rank() == 0; }

  // Every rank has a model of its own, and plans it beside those of its machine.
  std::unique_ptr<LoadedModel> load(Device device, std::vector<LoadedModel::Window> windows) {
    const LoadedModel::Options options{.checkpoint = checkpoint_,
                                       .average = arguments_.average,
                                       .device = device,
                                       .windows = std::move(windows),
                                       .rank = place_.world.rank(),
                                       .ranks_here = place_.local_size};
    ForwardPlan plan;
    plan_on_all_ranks(
        place_.world,
        [&] { plan = LoadedModel::plan(config_, options); },
        [](int rank) { return fmt::format("rank {}", rank); });
    if (is_root()) std::cerr << text_of_tiers(plan.memory) << std::flush;
    const ShownProgress progress(progress_, "load");
    std::unique_ptr<LoadedModel> model;
    load_with_changes(changes_,
                      [&] { model = std::make_unique<LoadedModel>(config_, options, plan); });
    return model;
  }

  void score(LoadedModel& model, const Inputs& inputs, const Phase& phase, EvalResult& result) {
    Scorer scorer(model, place_.world);
    std::optional<TokenBytes> bytes;
    if (inputs.tokenizer && !inputs.data.empty())
      bytes.emplace(*inputs.tokenizer, config_.model.vocab_size);
    for (const DataInput& data : inputs.data) {
      ShownProgress progress(progress_, data.name, 0, "batches");
      result.data.push_back({data.name,
                             scorer.score(data.name,
                                          *data.windows,
                                          phase.micro_batch_size,
                                          bytes ? &*bytes : nullptr,
                                          &*progress)});
    }
    for (const ChoiceInput& choices : inputs.choices) {
      ShownProgress progress(progress_, choices.set->name(), 0, "batches");
      result.choices.push_back(
          {choices.set.get(), scorer.score(*choices.set, *choices.packed, &*progress)});
    }
  }

  const EvalArguments& arguments_;
  const fs::path& checkpoint_;
  const config::Config& config_;
  const std::vector<ConfigChange>& changes_;  // since the checkpoint was saved
  RankPlace place_;
  RunSinks progress_;  // of rank 0
};

}  // namespace

int run_eval(const EvalArguments& arguments) {
  fs::path checkpoint;
  CheckpointConfig config;
  const int problem = run_before_mpi([&] {
    if (!arguments.details.empty() && arguments.choices.empty())
      throw UsageError("--details is about --choices, and there are none");
    checkpoint = find_checkpoint(arguments.run, arguments.step);
    config = load_checkpoint_config(checkpoint, arguments.overrides);
  });
  if (problem != 0) return problem;
  // MPI sets the variables of a launcher even for a process that has none.
  const ConsoleStyle style = console_style(arguments.console, this_terminal());
  return run_ranks({}, [&](const RankPlace& place) {
    return Evaluation(arguments, checkpoint, config.loaded.config, config.changes, place, style)
        .execute();
  });
}

}  // namespace moesaic::apps::eval
