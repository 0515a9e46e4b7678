// Experts on other ranks than in the order of their numbers: the same training, by name.
#include <cmath>
#include <mutex>
#include <numeric>

#include <fmt/format.h>

#include "tests/support/catch.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

// 3, 0, 5, 2, … : another order for every layer, on any number of ranks.
std::vector<std::int32_t> shuffled(std::size_t experts, int layer) {
  std::vector<std::int32_t> places(experts);
  for (std::size_t e = 0; e < experts; ++e)
    places[e] = static_cast<std::int32_t>((e * 3 + static_cast<std::size_t>(layer) + 2) % experts);
  return places;
}

struct Trained {
  std::vector<StepStats> stats;
  Snapshot state;
};

// `steps` steps, with experts shuffled from the start or in order.
Trained train(const std::vector<std::string>& overrides, int ranks, int steps, bool shuffle) {
  Trained result;
  std::mutex mutex;
  run_local_ranks(ranks, [&](Communicator& world) {
    Run run(hybrid_config(overrides), &world);
    if (shuffle) {
      for (const auto& named : run.model->moe_layers()) {
        const auto experts = static_cast<std::size_t>(named.moe->options().experts);
        run.params->set_places(named.moe->places(),
                               shuffled(experts, static_cast<int>(named.layer)),
                               run.trainer->stream());
      }
      run.trainer->stream().synchronize();
      run.params->initialize(static_cast<std::uint64_t>(run.config.run.seed));
    }
    const auto stats = run.steps(steps);
    if (world.rank() == 0) result.stats = stats;
    run.add_to(result.state, mutex);
  });
  return result;
}

void check_same_training(const std::vector<std::string>& overrides, int ranks) {
  constexpr int kSteps = 3;
  const Trained ordered = train(overrides, ranks, kSteps, false),
                elsewhere = train(overrides, ranks, kSteps, true);
  for (int i = 0; i < kSteps; ++i) {
    const StepStats& a = ordered.stats[static_cast<std::size_t>(i)];
    const StepStats& b = elsewhere.stats[static_cast<std::size_t>(i)];
    CHECK(b.loss == Approx(a.loss).epsilon(1e-9));
    CHECK(b.grad_norm == Approx(a.grad_norm).epsilon(1e-9));
    for (std::size_t l = 0; l < a.experts.size(); ++l)
      CHECK(b.experts[l].max_over_mean == a.experts[l].max_over_mean);
  }
  std::string worst;
  const double error = largest_relative_error(elsewhere.state, ordered.state, worst);
  INFO("worst: " << worst);
  CHECK(error < 1e-7);
}

}  // namespace

TEST_CASE("experts on other ranks train the same: AdamW, Muon, whole and sharded state") {
  check_same_training({"parallel.ep=2", "train.global_batch_size=4"}, 2);
  check_same_training({"parallel.ep=2", "optimizer.name=muon", "optimizer.ema_decay=0.9"}, 4);
  check_same_training({"parallel.ep=2", "parallel.zero=0", "dispatch.exchange=flat"}, 4);
  check_same_training({"parallel.ep=4", "dispatch.exchange=dense"}, 4);
}

TEST_CASE("experts on other ranks train the same: expert slices, tp, experts without tokens") {
  check_same_training({"parallel.ep=2", "parallel.etp=2", "parallel.tp=2"}, 4);
  check_same_training({"parallel.ep=4",
                       "optimizer.untouched=skip",
                       "optimizer.name=muon",
                       "data.sequence_length=16",
                       "model.balance.bias_rule=none"},
                      4);
}

}  // namespace moesaic::test
