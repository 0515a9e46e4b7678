// A run that stops and starts anew continues with the bits of one that never stopped.
#include <filesystem>

#include <unistd.h>

#include "core/checkpoint/checkpoint.h"
#include "tests/support/catch.h"
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

class Folder {
 public:
  Folder()
      : path_(std::filesystem::temp_directory_path() /
              ("moesaic_resume_" + std::to_string(getpid()))) {}
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace

TEST_CASE("stopped after any step and continued through a checkpoint, a run has the same bits") {
  for (const char* precision : {"f64", "f32", "bf16"}) {
    const auto config = hybrid_config(eventful(precision));
    Run whole(config);
    std::vector<StepStats> stats;
    const Folder folder;
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

TEST_CASE("a run continues on another number of ranks") {
  const auto config =
      hybrid_config({"optimizer.ema_decay=0.9", "model.balance.bias_rule=quantile_exact"});
  Run whole(config);
  whole.steps(2);
  const Snapshot middle = whole.snapshot();
  const StateValues values = whole.trainer->values();
  const auto expected = whole.steps(3);
  const Snapshot end = whole.snapshot();
  run_local_ranks(2, [&](Communicator& world) {
    Run part(config, &world);
    part.restore(middle, values);
    const auto stats = part.steps(3);
    const Snapshot state = part.snapshot();
    if (world.rank() != 0) return;
    for (std::size_t i = 0; i < stats.size(); ++i)
      CHECK(stats[i].loss == Approx(expected[i].loss).epsilon(1e-10));
    std::string worst;
    const double error = largest_relative_error(state, end, worst);
    INFO(worst);
    CHECK(error < 1e-9);
  });
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
