// Experts on other ranks than in the order of their numbers: the same training, by name.
#include <cmath>
#include <mutex>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/base/error.h"
#include "core/checkpoint/checkpoint.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"
#include "tests/train/run.h"
#include "tests/train/skewed_run.h"

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

namespace {

std::size_t moves(const std::vector<StepStats>& stats) {
  std::size_t n = 0;
  for (const StepStats& s : stats)
    n += s.moved.size();
  return n;
}

void check_moving_run(std::vector<std::string> overrides, int ranks) {
  constexpr int kSteps = 5;
  INFO(fmt::format("{} ranks, {}", ranks, fmt::join(overrides, " ")));
  const Placed still = run_skewed(overrides, ranks, kSteps);
  overrides.emplace_back("experts.place_every=2");
  const Placed moving = run_skewed(overrides, ranks, kSteps);
  CHECK(moves(still.stats) == 0);
  CHECK(moves(moving.stats) > 0);
  for (std::size_t i = 0; i < kSteps; ++i) {
    INFO("step " << i + 1);
    CHECK(moving.stats[i].loss == Approx(still.stats[i].loss).epsilon(1e-9));
    CHECK(moving.stats[i].grad_norm == Approx(still.stats[i].grad_norm).epsilon(1e-9));
  }
  std::string worst;
  const double error = largest_relative_error(without_places(moving.state), still.state, worst);
  INFO("worst: " << worst);
  CHECK(error < 1e-7);
}

// What the ranks hold before and after their experts go elsewhere, by name.
void check_bits_across_move(std::vector<std::string> overrides, int ranks) {
  INFO(fmt::format("{} ranks, {}", ranks, fmt::join(overrides, " ")));
  // One run that stops just before the experts would move, one that moves them at once.
  overrides.emplace_back("experts.place_every=1000");
  const std::vector<std::string> before = overrides;
  overrides.back() = "experts.place_every=3";
  const Placed still = run_skewed(before, ranks, 3), moved = run_skewed(overrides, ranks, 3);
  CHECK(moves(moved.stats) > 0);
  for (const ExpertsMoved& m : moved.stats.back().moved) {
    CHECK(m.after < m.before);
    CHECK(m.experts > 0);
    CHECK(m.bytes > 0);
  }
  CHECK(differences(without_places(moved.state), without_places(still.state)).empty());
}

}  // namespace

TEST_CASE("experts that move take their state with them to the bit") {
  check_bits_across_move({"parallel.ep=2"}, 2);
  check_bits_across_move({"parallel.ep=4", "optimizer.ema_decay=0.9"}, 4);
  check_bits_across_move({"parallel.ep=2", "optimizer.ema_decay=0.9"}, 4);
  check_bits_across_move({"parallel.ep=2", "parallel.zero=0"}, 4);
  check_bits_across_move({"parallel.ep=2", "optimizer.name=muon", "train.global_batch_size=6"}, 6);
  check_bits_across_move({"parallel.ep=2", "parallel.etp=2", "parallel.tp=2"}, 4);
}

TEST_CASE("experts that move, with masters beside their weights and split ones") {
  for (const char* master : {"f32", "split"}) {
    for (const char* optimizer : {"adamw", "muon"}) {
      const std::string m = std::string("optimizer.master=") + master,
                        o = std::string("optimizer.name=") + optimizer;
      check_bits_across_move(
          {"parallel.ep=2", "run.precision=bf16", "model.indexer.attention_form=gather", m, o}, 4);
    }
  }
}

TEST_CASE("training with experts that move is training without") {
  check_moving_run({"parallel.ep=2"}, 2);
  check_moving_run({"parallel.ep=2", "optimizer.name=muon", "optimizer.ema_decay=0.9"}, 4);
  check_moving_run({"parallel.ep=4", "parallel.zero=0", "optimizer.untouched=skip"}, 4);
  check_moving_run({"parallel.ep=2", "parallel.etp=2", "parallel.tp=2", "optimizer.name=muon"}, 4);
  check_moving_run({"parallel.ep=2", "parallel.cp=2", "train.micro_batch_size=2"}, 4);
  check_moving_run({"parallel.ep=4", "dispatch.buffer_factor=1", "dispatch.exchange=flat"}, 4);
  check_moving_run(
      {"parallel.ep=2", "train.phases=[{until: 3, freeze: ['*experts*']}, {until: 20}]"}, 4);
}

TEST_CASE("a skewed router: the busiest rank before and after its experts were placed") {
  const Placed run =
      run_skewed({"parallel.ep=4", "experts.place_every=2", "model.num_experts=32"}, 4, 4);
  const double before = worst_rank(run.stats[0]), after = worst_rank(run.stats[3]);
  INFO(fmt::format("rank max/mean of the worst layer {:.2f} -> {:.2f}", before, after));
  CHECK(before > 1.5);
  CHECK(after < before - 0.3);
  for (const ExpertLoad& load : run.stats[3].experts) {
    std::int64_t tokens = 0, of_ranks = 0;
    for (const std::int64_t n : load.tokens)
      tokens += n;
    for (const std::int64_t n : load.rank_tokens)
      of_ranks += n;
    CHECK(load.rank_tokens.size() == 4);
    CHECK(tokens == of_ranks);
  }
}

namespace {

const std::vector<std::string> kMoving{
    "parallel.ep=2", "optimizer.ema_decay=0.9", "experts.place_every=2"};

}  // namespace

TEST_CASE("a run whose experts move, stopped after any step and continued, has the same bits") {
  for (const char* optimizer : {"adamw", "muon"}) {
    const auto overrides = with(kMoving, std::string("optimizer.name=") + optimizer);
    const TemporaryFolder folder("expert_places");
    const Placed whole = live(overrides, 4, 6, folder.path() / "whole");
    CHECK(moves(whole.stats) > 0);
    for (const int stop : {1, 2, 3, 4}) {
      INFO(optimizer << ", stopped after step " << stop);
      const auto own = folder.path() / std::to_string(stop);
      live(overrides, 4, stop, own);
      const Placed rest = live(overrides, 4, 6, own);
      CHECK(differences(rest.state, whole.state).empty());
      REQUIRE(rest.stats.size() == static_cast<std::size_t>(6 - stop));
      for (std::size_t i = 0; i < rest.stats.size(); ++i)
        CHECK(same_numbers(rest.stats[i], whole.stats[i + static_cast<std::size_t>(stop)]));
    }
  }
}

TEST_CASE("checkpoints of experts that moved load into any layout, and into runs that move none") {
  struct Next {
    int ranks;
    std::string layout, every;
  };
  for (const Next& next : {Next{4, "parallel.ep=4", "experts.place_every=2"},
                           Next{1, "parallel.ep=1", "experts.place_every=2"},
                           Next{4, "parallel.ep=2", "experts.place_every=0"},
                           Next{2, "parallel.ep=2", "experts.place_every=3"}}) {
    INFO(next.ranks << " ranks, " << next.layout << " " << next.every);
    const TemporaryFolder folder("expert_places");
    const Placed saved = live(kMoving, 4, 3, folder.path());
    const auto overrides = with(with(kMoving, next.layout), next.every);
    const Placed loaded = live(overrides, next.ranks, 3, folder.path());
    CHECK(differences(without_places(loaded.state), without_places(saved.state)).empty());
    // Whatever is there goes on, and back again.
    const Placed on = live(overrides, next.ranks, 5, folder.path());
    const Placed back = live(kMoving, 4, 5, folder.path());
    CHECK(differences(without_places(back.state), without_places(on.state)).empty());
    CHECK(live(kMoving, 4, 6, folder.path()).stats.size() == 1);
  }
}

TEST_CASE("averages of the load start anew where a checkpoint has none") {
  const TemporaryFolder folder("expert_places");
  live(with(kMoving, "experts.place_every=0"), 2, 2, folder.path());
  const Placed on = live(kMoving, 2, 4, folder.path());
  CHECK(moves(on.stats) > 0);
}

TEST_CASE("a table that gives two experts one place is refused") {
  Snapshot state;
  StateValues values;
  std::mutex mutex;
  run_local_ranks(2, [&](Communicator& world) {
    Run run(hybrid_config(skewed(kMoving)), &world);
    run.add_to(state, mutex);
    if (world.rank() == 0) values = run.trainer->values();
  });
  const auto restore = [&] {
    run_local_ranks(2, [&](Communicator& world) {
      Run run(hybrid_config(skewed(kMoving)), &world);
      run.restore(state, values);
    });
  };
  CHECK_NOTHROW(restore());
  for (auto& [name, bytes] : state) {
    if (name.ends_with("experts.places")) std::fill(bytes.begin(), bytes.end(), std::byte{0});
  }
  CHECK_THROWS_AS(restore(), InputError);
}

}  // namespace moesaic::test
