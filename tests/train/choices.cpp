// Choices of a run that are shown to an observer, and taken from one.
#include "core/nn/choices.h"

#include <map>
#include <mutex>
#include <numeric>

#include "tests/support/catch.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

const std::vector<std::string> kSettings{"train.global_batch_size=4", "train.micro_batch_size=1"};

// The micro-batches in which a layer chose; tells every token of a mixture the experts 0, 1, … when asked to.
class Watcher final : public ChoiceObserver {
 public:
  explicit Watcher(bool replaces) : replaces_(replaces) {}
  ConstTensorView replace(const Choice& choice, Stream& stream) override {
    stream.synchronize();
    ++seen[choice.layer][choice.micro_batch];
    if (!replaces_ || choice.layer.find("indexer") != std::string::npos) return {};
    memory_ = Buffer(choice.chosen.bytes(), kCpu, "given");
    const TensorView given = memory_.view(choice.chosen.shape(), DType::i32);
    for (std::int64_t t = 0; t < given.dim(0); ++t)
      std::iota(given.as<std::int32_t>() + t * given.dim(1),
                given.as<std::int32_t>() + (t + 1) * given.dim(1),
                0);
    return given;
  }
  std::map<std::string, std::map<std::int64_t, int>> seen;

 private:
  bool replaces_;
  Buffer memory_;
};

}  // namespace

TEST_CASE(
    "an observer sees every choice of a step once, and a run that is looked at has the same bits") {
  auto settings = kSettings;
  settings.emplace_back("activations.recompute=[full]");  // choices are not made again
  const auto config = hybrid_config(settings);
  Watcher watcher(false);  // outlives the run
  Run alone(config), watched(config);
  watched.trainer->set_choices(&watcher);
  for (int step = 1; step <= 2; ++step) {
    const StepStats a = alone.step(), b = watched.step();
    CHECK(a.loss == b.loss);
    CHECK(a.grad_norm == b.grad_norm);
  }
  CHECK(watcher.seen.size() >= watched.model->moe_layers().size());
  for (const auto& [layer, micro_batches] : watcher.seen) {
    INFO(layer);
    CHECK(micro_batches.size() == 4);
    for (const auto& [number, times] : micro_batches) {
      CHECK(number < 4);
      CHECK(times == 2);  // steps
    }
  }
}

TEST_CASE("given choices are used in place of the layer's own") {
  auto settings = kSettings;
  settings.emplace_back("log.expert_every=1");
  const auto config = hybrid_config(settings);
  Watcher watcher(true);
  Run run(config);
  run.trainer->set_choices(&watcher);
  const StepStats stats = run.step();
  for (const ExpertLoad& load : stats.experts) {
    INFO("layer " << load.layer);
    const auto k = static_cast<std::size_t>(config.model.num_experts_per_token);
    for (std::size_t e = 0; e < load.tokens.size(); ++e)
      CHECK(load.tokens[e] == (e < k ? stats.tokens : 0));
  }
  run.trainer->set_choices(nullptr);
  for (const ExpertLoad& load : run.step().experts)
    CHECK(load.dead_experts <
          static_cast<std::int64_t>(load.tokens.size()) - config.model.num_experts_per_token);
}

TEST_CASE("ranks number the micro-batches of the global batch") {
  const auto config = hybrid_config(kSettings);
  std::mutex lock;
  std::map<std::string, std::map<std::int64_t, int>> all;
  std::map<int, std::int64_t> first;
  run_local_ranks(2, [&](Communicator& world) {
    Watcher watcher(false);
    Run run(config, &world);
    run.trainer->set_choices(&watcher);
    run.step();
    const std::lock_guard guard(lock);
    first[world.rank()] = watcher.seen.begin()->second.begin()->first;
    for (const auto& [layer, micro_batches] : watcher.seen) {
      for (const auto& [number, times] : micro_batches)
        all[layer][number] += times;
    }
  });
  CHECK(first == std::map<int, std::int64_t>{{0, 0}, {1, 2}});
  for (const auto& [layer, micro_batches] : all) {
    INFO(layer);
    CHECK(micro_batches == std::map<std::int64_t, int>{{0, 1}, {1, 1}, {2, 1}, {3, 1}});
  }
}

}  // namespace moesaic::test
