#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "apps/assembly.h"
#include "apps/verb.h"
#include "comm/mpi_environment.h"
#include "core/checkpoint/checkpoint.h"
#include "core/data/entropy.h"
#include "core/model/from_config.h"

namespace moesaic::apps {
namespace {

struct TrainArguments {
  ConfigArguments config;
  std::string resume = "auto";
};

std::filesystem::path checkpoints_of(const config::Config& config) { return std::filesystem::path(config.run.dir) / "checkpoints"; }

/// One training run from the point of view of one rank.
class TrainRun {
 public:
  TrainRun(const TrainArguments& arguments, Communicator& world)
      : arguments_(arguments), loaded_(config::load_config(arguments.config.path, arguments.config.overrides)), world_(world) {}

  int execute() {
    prepare();
    resume();
    const auto& train = config().train;
    while (trainer_->steps_done() < train.steps) {
      const StepStats stats = trainer_->step();
      say(fmt::format("step {}/{} | loss {:.4f} | gnorm {:.3f} | lr {:.2e} | {:.1f}k tok/s | {:.2f} s", stats.step, train.steps, stats.loss, stats.grad_norm, stats.learning_rate, static_cast<double>(stats.tokens) / stats.seconds / 1000, stats.seconds));
      if (valid_ && train.eval_every > 0 && stats.step % train.eval_every == 0) report_eval();
      const std::int64_t every = config().checkpoint.every;
      if (every > 0 && stats.step % every == 0) save();
    }
    if (valid_) report_final();
    if (config().checkpoint.save_at_end) save();
    return 0;
  }

 private:
  const config::Config& config() const { return loaded_.config; }
  void say(const std::string& line) const {
    if (world_.rank() == 0) std::cout << line << std::endl;
  }

  void prepare() {
    assembly_ = assemble(config(), true);
    train_ = open_tokens(config().data.train, config(), "data.train");
    if (!config().data.valid.empty()) valid_ = open_tokens(config().data.valid, config(), "data.valid");
    trainer_ = std::make_unique<Trainer>(Trainer::Parts{.config = &config(),
                                                        .world = &world_,
                                                        .params = assembly_.params.get(),
                                                        .model = assembly_.model.get(),
                                                        .optimizer = assembly_.optimizer.get(),
                                                        .train = train_,
                                                        .valid = valid_,
                                                        .device = assembly_.device,
                                                        .recompute = recompute_policy(config().activations),
                                                        .stream_mode = config().debug.immediate_streams ? Stream::Mode::immediate : Stream::Mode::worker});
  }

  void resume() {}
  void save() {}

  void report_eval() {
    const EvalStats stats = trainer_->evaluate();
    say(fmt::format("step {} | eval loss {:.4f} nats/token over {} tokens", trainer_->steps_done(), stats.loss, stats.predicted_tokens));
  }

  void report_final() {
    const EvalStats stats = trainer_->evaluate();
    data::TokenCounts counts;
    counts.add(*valid_);
    const double unigram = data::unigram_entropy(counts), bigram = data::bigram_entropy(counts);
    say(fmt::format("held-out loss {:.4f} nats/token ({} tokens) | unigram entropy {:.4f} (0.75 x = {:.4f}) | bigram entropy {:.4f}", stats.loss,
                    stats.predicted_tokens, unigram, 0.75 * unigram, bigram));
  }

  const TrainArguments& arguments_;
  config::LoadedConfig loaded_;
  Communicator& world_;
  Assembly assembly_;
  std::shared_ptr<const data::TokenSource> train_, valid_;
  std::unique_ptr<Trainer> trainer_;
};

}  // namespace

void add_train(CLI::App& app, Action& action) {
  CLI::App* verb = app.add_subcommand("train", "Train a model (start it with mpirun)");
  const auto arguments = std::make_shared<TrainArguments>();
  add_config_arguments(*verb, arguments->config);
  verb->add_option("--resume", arguments->resume, "auto: continue from the newest checkpoint of run.dir, if any; must; never")
      ->check(CLI::IsMember({"auto", "must", "never"}));
  verb->footer("Example:\n  mpirun -np 2 moesaic train configs/quickstart.yaml train.steps=100\n");
  verb->callback([&action, arguments] {
    action = [arguments] {
      MpiEnvironment mpi;
      TrainRun run(*arguments, mpi.world());
      return run.execute();
    };
  });
}

}  // namespace moesaic::apps
