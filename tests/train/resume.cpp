// A run that stops and starts anew continues with the bits of one that never stopped.
#include <filesystem>
#include <mutex>

#include "core/checkpoint/checkpoint.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

constexpr int kSteps = 6;

std::vector<std::string> eventful(const char* precision) {
  // Phases with other lengths and frozen parameters, a skipped step, statistics of the previous step, an average.
  return {std::string("run.precision=") + precision,
          "train.phases=[{until: 2, freeze: [lm_head.weight], sequence_length: 32}, {until: 4, "
          "freeze: [\"model.layers.0.*\"]}, {until: 20}]",
          "debug.inject_nan_step=3",
          "optimizer.name=muon",
          "optimizer.qk_clip_tau=0.05",
          "optimizer.ema_decay=0.9",
          "model.balance.aux_loss=global",
          std::string("model.indexer.attention_form=") +
              (std::string(precision) == "f32" ? "gather" : "masked")};
}

}  // namespace

TEST_CASE("stopped after any step and continued through a checkpoint, a run has the same bits") {
  for (const char* precision : {"f64", "f32", "bf16"}) {
    const auto config = hybrid_config(eventful(precision));
    Run whole(config);
    std::vector<StepStats> stats;
    const TemporaryFolder folder("resume");
    for (int k = 0; k < kSteps; ++k) {
      save_checkpoint(folder.path(),
                      k,
                      whole.trainer->state(),
                      whole.trainer->values(),
                      "",
                      0,
                      0,
                      whole.trainer->stream());
      stats.push_back(whole.step());
    }
    CHECK(stats[2].skipped);
    const Snapshot end = whole.snapshot();
    const StateValues end_values = whole.trainer->values();
    for (const CheckpointInfo& checkpoint : list_checkpoints(folder.path())) {
      INFO(precision << ", continued from step " << checkpoint.step);
      Run part(config);
      part.trainer->load_values(
          load_checkpoint(checkpoint.path, part.trainer->state(), true, part.trainer->stream()));
      REQUIRE(part.trainer->steps_done() == checkpoint.step);
      for (auto k = static_cast<std::size_t>(checkpoint.step); k < kSteps; ++k)
        CHECK(same_numbers(part.step(), stats[k]));
      CHECK(differences(part.snapshot(), end).empty());
      CHECK(part.trainer->values().integers == end_values.integers);
    }
    CHECK(list_checkpoints(folder.path()).size() == kSteps);
  }
}

TEST_CASE(
    "every edge of a schedule may lie at the stop: accumulation, warm-up, decay, evaluation, end") {
  // Warm-up to step 2, stable, decay from step 4 on; two micro-batches per rank and step; an evaluation after every other
  // step, on the side of the stop where it fell.
  const auto config = hybrid_config({"train.steps=7",
                                     "train.micro_batch_size=2",
                                     "optimizer.lr_schedule=wsd",
                                     "optimizer.warmup_steps=2",
                                     "optimizer.decay_steps=3",
                                     "optimizer.lr_min=1e-4",
                                     "model.balance.bias_rule=quantile_exact",
                                     "train.eval_batches=1"});
  const auto evaluates = [](std::int64_t step) { return step % 2 == 0; };
  Run whole(config);
  const TemporaryFolder folder("resume");
  std::vector<StepStats> stats;
  std::vector<double> held_out;
  for (std::int64_t k = 0; k <= 7; ++k) {
    // The order of the program: step, evaluation, save.
    if (k > 0) stats.push_back(whole.step());
    held_out.push_back(k > 0 && evaluates(k) ? whole.trainer->evaluate().loss : 0);
    save_checkpoint(folder.path(),
                    k,
                    whole.trainer->state(),
                    whole.trainer->values(),
                    "",
                    0,
                    0,
                    whole.trainer->stream());
  }
  const Snapshot end = whole.snapshot();
  for (const CheckpointInfo& checkpoint : list_checkpoints(folder.path())) {
    INFO("continued from step " << checkpoint.step);
    Run part(config);
    part.trainer->load_values(
        load_checkpoint(checkpoint.path, part.trainer->state(), true, part.trainer->stream()));
    for (std::int64_t k = checkpoint.step + 1; k <= 7; ++k) {
      CHECK(same_numbers(part.step(), stats[static_cast<std::size_t>(k - 1)]));
      if (evaluates(k))
        CHECK(part.trainer->evaluate().loss == held_out[static_cast<std::size_t>(k)]);
    }
    CHECK(differences(part.snapshot(), end).empty());
    CHECK(part.trainer->values().texts == whole.trainer->values().texts);
  }
}

TEST_CASE("a checkpoint of any number of ranks gives every number of ranks the same bits") {
  const auto config = hybrid_config({"optimizer.ema_decay=0.9",
                                     "optimizer.name=muon",
                                     "train.global_batch_size=12",
                                     "parallel.zero=0",  // one rank writes all
                                     "train.steps=20"});
  const TemporaryFolder folder("resume");
  for (const int saved_by : {1, 2, 3, 4}) {
    const auto dir = folder.path() / std::to_string(saved_by);
    Snapshot saved;
    StateValues values;
    run_local_ranks(saved_by, [&](Communicator& world) {
      Run run(config, &world);
      run.steps(2);
      const Snapshot state = run.snapshot();
      if (world.rank() != 0) return;
      saved = state;
      values = run.trainer->values();
      save_checkpoint(dir, 2, run.trainer->state(), values, "", 0, 0, run.trainer->stream());
    });
    const auto checkpoint = latest_checkpoint(dir);
    REQUIRE(checkpoint);
    for (const int loaded_by : {1, 2, 3, 4}) {
      std::vector<std::string> different(static_cast<std::size_t>(loaded_by));
      std::vector<bool> same_values(static_cast<std::size_t>(loaded_by));
      std::mutex mutex;
      run_local_ranks(loaded_by, [&](Communicator& world) {
        Run run(config, &world);
        run.trainer->load_values(
            load_checkpoint(checkpoint->path, run.trainer->state(), true, run.trainer->stream()));
        const std::string names = differences(run.snapshot(), saved);
        const std::lock_guard lock(mutex);
        different[static_cast<std::size_t>(world.rank())] = names;
        const StateValues now = run.trainer->values();
        same_values[static_cast<std::size_t>(world.rank())] =
            now.integers == values.integers && now.texts == values.texts;
      });
      INFO("saved by " << saved_by << " ranks, loaded by " << loaded_by);
      for (std::size_t r = 0; r < different.size(); ++r) {
        CHECK(different[r].empty());
        CHECK(same_values[r]);
      }
    }
  }
}

TEST_CASE("weights alone start a new run: the model's bits, no step, no optimizer state") {
  const auto config = hybrid_config({"optimizer.ema_decay=0.9"});
  const TemporaryFolder folder("resume");
  Run trained(config);
  trained.steps(3);
  save_checkpoint(folder.path(),
                  3,
                  trained.trainer->state(),
                  trained.trainer->values(),
                  "",
                  0,
                  0,
                  trained.trainer->stream());
  Run fresh(config);
  const Snapshot initial = fresh.snapshot();
  load_checkpoint(latest_checkpoint(folder.path())->path,
                  fresh.trainer->weights(),
                  false,
                  fresh.trainer->stream());
  fresh.trainer->weights_were_loaded();
  CHECK(fresh.trainer->steps_done() == 0);
  const Snapshot now = fresh.snapshot(), source = trained.snapshot();
  CHECK(differences(now, source, "model.").empty());
  CHECK(differences(now, initial, "optimizer/").empty());
  CHECK(differences(now, initial, "buffer/").empty());
  CHECK_FALSE(differences(now, initial, "model.").empty());
  Run again(config);
  CHECK(fresh.step().loss < again.step().loss);
}

TEST_CASE("a rank's wish to stop stops all before the step, without a trace") {
  const auto config = hybrid_config();
  const JobResult quiet = run_job(config, 2, 3);
  std::vector<std::int64_t> agreed(2, 0);
  std::vector<Snapshot> states(2);
  Snapshot gathered;
  std::mutex mutex;
  run_local_ranks(2, [&](Communicator& world) {
    Run run(config, &world);
    const auto rank = static_cast<std::size_t>(world.rank());
    run.steps(2);
    std::int64_t wish = world.rank() == 1 ? 5 : 0;
    const auto none = run.trainer->step_unless_stopped(wish);
    agreed[rank] = none || run.trainer->steps_done() != 2 ? -1 : wish;
    wish = 0;
    const auto third = run.trainer->step_unless_stopped(wish);
    if (!third || !same_numbers(*third, quiet.stats[2])) agreed[rank] = -2;
    states[rank] = run.weights_of_kernels();
    run.add_to(gathered, mutex);
  });
  CHECK(agreed == std::vector<std::int64_t>{5, 5});
  CHECK(differences(gathered, quiet.states[0]).empty());
  for (std::size_t r = 0; r < 2; ++r)
    CHECK(differences(states[r], quiet.weights[r]).empty());
}

// A request to stop meets the edge between two phases of other sequence lengths: the state is saved with the buffers of one
// phase in place and loaded into those of the other. Two ranks, and the program's order: wish, save, end.
TEST_CASE(
    "stopped before, at or after an edge between phases, a run continues with the same bits") {
  constexpr std::int64_t kEdge = 3, kEnd = 6;
  // By steps, with the batch in tokens held; then three phases by tokens, the stop at both edges.
  const auto settings =
      GENERATE(std::vector<std::string>{"train.phases=[{until: 3, sequence_length: 16}, "
                                        "{until: 20, sequence_length: 64}]",
                                        "train.global_batch_size=null",
                                        "train.global_batch_tokens=256"},
               std::vector<std::string>{"train.phases=[{until: 3, sequence_length: 64}, "
                                        "{until: 4, sequence_length: 16}, {until: 20}]",
                                        "optimizer.ema_decay=0.9"});
  auto overrides = settings;
  overrides.emplace_back("parallel.zero=0");  // one rank writes all
  const auto config = hybrid_config(overrides);
  const JobResult quiet = run_job(config, 2, kEnd);
  for (const std::int64_t stop : {kEdge - 1, kEdge, kEdge + 1, kEdge + 2}) {
    INFO(settings[0] << ", stopped at step " << stop);
    const TemporaryFolder folder("resume");
    std::vector<Snapshot> ends(2);
    std::vector<std::int64_t> stopped_at(2), wrong(2, 0);
    run_local_ranks(2, [&](Communicator& world) {
      const auto rank = static_cast<std::size_t>(world.rank());
      Run life(config, &world);
      std::int64_t wish = 0;
      while (wish == 0) {
        wish = world.rank() == 1 && life.trainer->steps_done() == stop ? 5 : 0;
        const auto stats = life.trainer->step_unless_stopped(wish);
        const auto done = static_cast<std::size_t>(life.trainer->steps_done());
        if (stats && !same_numbers(*stats, quiet.stats[done - 1])) ++wrong[rank];
      }
      stopped_at[rank] = life.trainer->steps_done();
      if (world.rank() == 0)
        save_checkpoint(folder.path(),
                        stop,
                        life.trainer->state(),
                        life.trainer->values(),
                        "",
                        0,
                        0,
                        life.trainer->stream());
    });
    CHECK(stopped_at == std::vector<std::int64_t>{stop, stop});
    run_local_ranks(2, [&](Communicator& world) {
      const auto rank = static_cast<std::size_t>(world.rank());
      Run life(config, &world);
      life.trainer->load_values(load_checkpoint(latest_checkpoint(folder.path())->path,
                                                life.trainer->state(),
                                                true,
                                                life.trainer->stream()));
      while (life.trainer->steps_done() < kEnd) {
        const StepStats stats = life.step();
        if (!same_numbers(stats, quiet.stats[static_cast<std::size_t>(stats.step - 1)]))
          ++wrong[rank];
      }
      ends[rank] = life.snapshot();
    });
    CHECK(wrong == std::vector<std::int64_t>{0, 0});
    for (std::size_t r = 0; r < 2; ++r)
      CHECK(differences(ends[r], quiet.states[r]).empty());
  }
}

TEST_CASE("a run continues on another number of ranks") {
  const auto config =
      hybrid_config({"optimizer.ema_decay=0.9", "model.balance.bias_rule=quantile_exact"});
  Run whole(config);
  whole.steps(2);
  const Snapshot middle = whole.snapshot();
  const StateValues values = whole.trainer->values();
  const auto expected = whole.steps(3);
  const Snapshot end = whole.snapshot();
  Snapshot state;
  std::mutex mutex;
  run_local_ranks(2, [&](Communicator& world) {
    Run part(config, &world);
    part.restore(middle, values);
    const auto stats = part.steps(3);
    part.add_to(state, mutex);
    if (world.rank() != 0) return;
    for (std::size_t i = 0; i < stats.size(); ++i)
      CHECK(stats[i].loss == Approx(expected[i].loss).epsilon(1e-10));
  });
  std::string worst;
  const double error = largest_relative_error(state, end, worst);
  INFO(worst);
  CHECK(error < 1e-9);
}

TEST_CASE("a checkpoint of another seed, or without its values, is refused") {
  Run run(hybrid_config());
  StateValues values = run.trainer->values();
  values.texts["data_order"].replace(0, std::string("run.seed=3").size(), "run.seed=4");
  CHECK_THROWS_AS(run.trainer->load_values(values), UsageError);
  values = run.trainer->values();
  values.integers.erase("optimizer.updates");
  CHECK_THROWS_AS(run.trainer->load_values(values), InputError);
  values = run.trainer->values();
  values.integers.erase("step");
  CHECK_THROWS_AS(run.trainer->load_values(values), InputError);
}

}  // namespace moesaic::test
