// A step that is not finite changes nothing, on all ranks alike.
#include <cmath>
#include <limits>

#include "tests/support/catch.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

std::vector<std::string> everything(const char* balance) {
  return {"optimizer.ema_decay=0.9",
          "optimizer.qk_clip_tau=0.05",
          "optimizer.warmup_steps=10",
          "model.balance.aux_loss=global",
          std::string("model.balance.bias_rule=") + balance};
}

}  // namespace

TEST_CASE("a step with a gradient that is not finite leaves all state alone and moves on") {
  for (const char* balance : {"quantile", "quantile_exact", "sign"}) {
    for (const char* optimizer : {"optimizer.name=adamw", "optimizer.name=muon"}) {
      INFO(balance << ", " << optimizer);
      auto overrides = everything(balance);
      overrides.emplace_back(optimizer);
      const auto healthy = hybrid_config(overrides);
      overrides.emplace_back("debug.inject_nan_step=3");
      Run run(hybrid_config(overrides)), reference(healthy);
      run.steps(2);
      reference.steps(2);
      const Snapshot before = run.snapshot();
      const StepStats bad = run.step(), good = reference.step();
      CHECK(bad.skipped);
      CHECK(!good.skipped);
      CHECK(!std::isfinite(bad.grad_norm));
      CHECK(bad.loss == good.loss);  // the same samples at the same weights
      CHECK(differences(run.snapshot(), before).empty());
      CHECK_FALSE(differences(reference.snapshot(), before).empty());
      CHECK(run.trainer->steps_done() == 3);
      CHECK(run.trainer->consecutive_bad_steps() == 1);
      CHECK(run.trainer->values().integers.at("skipped_steps") == 1);
      CHECK(run.trainer->values().integers.at("optimizer.updates") == 2);
      const StepStats next = run.step(), expected = reference.step();
      CHECK_FALSE(next.skipped);
      CHECK(run.trainer->consecutive_bad_steps() == 0);
      CHECK(next.learning_rate == expected.learning_rate);
      CHECK(next.learning_rate == Approx(3e-3 * 4 / 10));
      CHECK(next.loss != expected.loss);  // the update of step 3 is missing
    }
  }
}

TEST_CASE("the first update counts as the first one after a skipped step") {
  // Two runs whose first update is made from the same samples at the same weights and rate.
  Run run(hybrid_config(
      {"debug.inject_nan_step=1", "optimizer.warmup_steps=0", "optimizer.ema_decay=0.5"}));
  CHECK(run.step().skipped);
  StateValues at_one;
  Run other(hybrid_config({"optimizer.warmup_steps=0", "optimizer.ema_decay=0.5"}));
  const Snapshot start = other.snapshot();
  CHECK(differences(start, run.snapshot()).empty());
  at_one = other.trainer->values();
  at_one.integers["step"] = 1;
  other.restore(start, at_one);
  run.step();
  other.step();
  CHECK(differences(run.snapshot(), other.snapshot()).empty());
  const Snapshot after = run.snapshot();
  CHECK(after.at("ema/model.norm.weight") == after.at("model.norm.weight"));
}

TEST_CASE("one rank's bad gradient is every rank's skipped step") {
  auto overrides = everything("quantile_exact");
  const auto healthy = hybrid_config(overrides);
  overrides.emplace_back("debug.inject_nan_step=2");
  const auto broken = hybrid_config(overrides);
  std::vector<Snapshot> states(2);
  run_local_ranks(2, [&](Communicator& world) {
    Run run(world.rank() == 1 ? broken : healthy, &world);
    const bool first = run.step().skipped;
    const Snapshot before = run.snapshot();
    const bool second = run.step().skipped;
    const bool same = differences(before, run.snapshot()).empty();
    const std::int64_t bad = run.trainer->consecutive_bad_steps();
    const bool third = run.step().skipped;
    states[static_cast<std::size_t>(world.rank())] = run.weights_of_kernels();
    if (first || !second || !same || bad != 1 || third)
      throw InternalError("the guard decides differently on rank " + std::to_string(world.rank()));
  });
  CHECK(differences(states[0], states[1]).empty());
}

TEST_CASE("a skipped step leaves parameters of every age alone") {
  for (const char* optimizer : {"optimizer.name=adamw", "optimizer.name=muon"}) {
    Run run(hybrid_config(
        {optimizer,
         "debug.inject_nan_step=3",
         "train.phases=[{until: 1, freeze: [lm_head.weight, \"*.q_proj.weight\"]}, {until: 20}]"}));
    run.steps(2);
    const Snapshot before = run.snapshot();
    CHECK(run.step().skipped);
    CHECK(differences(run.snapshot(), before).empty());
  }
}

TEST_CASE("a loss that is not finite skips the step even where all gradients are finite") {
  // In the warm-up only the indexer has gradients, and nothing after its layer reaches them.
  Run run(hybrid_config({"train.phases=[{until: 20, sparse_stage: warmup}]"}));
  run.step();
  run.trainer->stream().synchronize();
  run.params->weight(run.params->find("model.norm.weight"), 0).as<double>()[0] =
      std::numeric_limits<double>::infinity();
  const Snapshot before = run.snapshot();
  const StepStats stats = run.step();
  CHECK(std::isfinite(stats.grad_norm));
  CHECK(!std::isfinite(stats.loss));
  CHECK(stats.skipped);
  CHECK(differences(run.snapshot(), before).empty());
}

TEST_CASE("bad steps in a row are counted") {
  // Infinite weights: every loss is not finite from then on.
  Run run(hybrid_config({"run.precision=f32"}));
  run.step();
  run.trainer->stream().synchronize();
  run.params->weight(run.params->find("model.norm.weight"), 0).as<float>()[0] =
      std::numeric_limits<float>::infinity();
  const Snapshot before = run.snapshot();
  for (int i = 1; i <= 3; ++i) {
    CHECK(run.step().skipped);
    CHECK(run.trainer->consecutive_bad_steps() == i);
  }
  CHECK(differences(before, run.snapshot()).empty());
}

TEST_CASE("a gradient is made non-finite whatever is frozen") {
  Run run(hybrid_config(
      {"debug.inject_nan_step=1",
       "train.phases=[{until: 20, freeze: [model.embed_tokens.weight, \"model.layers.0.*\"]}]"}));
  CHECK(run.step().skipped);
}

}  // namespace moesaic::test
