// Experts that lie outside the device and go to other ranks: the bits of experts on the device that do.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"
#include "tests/train/run.h"
#include "tests/train/skewed_run.h"

namespace moesaic::test {
namespace {

using Overrides = std::vector<std::string>;

std::int64_t moved(const std::vector<StepStats>& stats) {
  std::int64_t n = 0;
  for (const StepStats& s : stats)
    for (const ExpertsMoved& layer : s.moved)
      n += layer.experts;
  return n;
}

void check_same(const Placed& found, const Placed& expected) {
  REQUIRE(found.stats.size() == expected.stats.size());
  for (std::size_t i = 0; i < expected.stats.size(); ++i) {
    INFO("step " << expected.stats[i].step);
    CHECK(same_numbers(found.stats[i], expected.stats[i]));
    REQUIRE(found.stats[i].moved.size() == expected.stats[i].moved.size());
    for (std::size_t l = 0; l < expected.stats[i].moved.size(); ++l) {
      CHECK(found.stats[i].moved[l].experts == expected.stats[i].moved[l].experts);
      CHECK(found.stats[i].moved[l].bytes > 0);
    }
  }
  CHECK(differences(found.state, expected.state).empty());
}

std::string text(const Offload& o) {
  return fmt::format("{}, {} on the device, {} in the file",
                     o.weights ? "full" : "states",
                     o.on_device,
                     o.in_file);
}

void check_moves(Overrides overrides, int ranks, const std::vector<Offload>& offloads) {
  constexpr int kSteps = 5;
  overrides.emplace_back("experts.place_every=2");
  INFO(fmt::format("{} ranks, {}", ranks, fmt::join(overrides, " ")));
  const Placed resident = run_skewed(overrides, ranks, kSteps);
  CHECK(moved(resident.stats) > 0);
  for (const Offload& offload : offloads) {
    INFO(text(offload));
    check_same(run_skewed(overrides, ranks, kSteps, offload), resident);
  }
}

const Offload kStates{.weights = false}, kFull{},
    kStatesRoomy{.weights = false, .on_device = 0.6, .in_file = 0.4},
    kFullRoomy{.on_device = 0.5, .in_file = 0.4}, kFullHere{.on_device = 1};

}  // namespace

TEST_CASE("offloaded experts that move: two ranks") {
  check_moves({"parallel.ep=2"}, 2, {kStates, kFull, kStatesRoomy, kFullRoomy, kFullHere});
  check_moves({"parallel.ep=2", "optimizer.name=muon", "optimizer.ema_decay=0.9"},
              2,
              {kStatesRoomy, kFull});
  check_moves({"parallel.ep=2", "optimizer.untouched=skip", "data.sequence_length=16"},
              2,
              {kStates, kFullRoomy});
  for (const char* optimizer : {"optimizer.name=adamw", "optimizer.name=muon"})
    check_moves({"parallel.ep=2",
                 optimizer,
                 "optimizer.untouched=lazy",
                 "data.sequence_length=16",
                 "model.num_experts=32"},
                2,
                {kFull, kFullRoomy});
}

TEST_CASE(
    "offloaded experts that move: ranks that share experts, with whole and with sharded state") {
  check_moves({"parallel.ep=2", "optimizer.ema_decay=0.9"}, 4, {kStatesRoomy, kFullRoomy});
  check_moves({"parallel.ep=2", "parallel.zero=0", "optimizer.name=muon"}, 4, {kStates, kFull});
  check_moves({"parallel.ep=2", "optimizer.name=muon", "train.global_batch_size=6"},
              6,
              {kStates, kFullRoomy});
}

TEST_CASE("offloaded experts that move: masters beside their weights, and split ones") {
  for (const char* master : {"f32", "split"}) {
    for (const char* optimizer : {"adamw", "muon"}) {
      check_moves({"parallel.ep=2",
                   "run.precision=bf16",
                   "optimizer.untouched=skip",
                   std::string("optimizer.master=") + master,
                   std::string("optimizer.name=") + optimizer},
                  4,
                  {kStatesRoomy, kFullRoomy});
    }
  }
}

TEST_CASE("offloaded experts that move: four ranks, slices of experts, pipelines, orders, phases") {
  check_moves({"parallel.ep=4"}, 4, {kFullRoomy});
  check_moves({"parallel.ep=2", "parallel.etp=2", "parallel.tp=2"}, 4, {kStates, kFullRoomy});
  check_moves({"parallel.ep=2", "parallel.pp=2"}, 4, {kFullRoomy});
  check_moves({"parallel.ep=2", "parallel.order=vertical"}, 2, {kFull});
  check_moves({"parallel.ep=2",
               "optimizer.ema_decay=0.9",
               "train.phases=[{until: 3, freeze: ['*experts*']}, {until: 20}]"},
              4,
              {kStates, kFullRoomy});
}

TEST_CASE(
    "offloaded experts that move: a run goes on with other room, or without any offload, and "
    "back") {
  const Overrides overrides{"parallel.ep=2",
                            "optimizer.ema_decay=0.9",
                            "experts.place_every=2",
                            "run.precision=bf16",
                            "optimizer.master=split"};
  const TemporaryFolder folder("offloaded_places");
  const Placed whole = live(overrides, 4, 6, folder.path() / "whole");
  CHECK(moved(whole.stats) > 0);
  const std::vector<std::optional<Offload>> kept{std::nullopt, kFullRoomy, kStates, kFull};
  for (std::size_t k = 0; k < kept.size(); ++k) {
    const auto own = folder.path() / std::to_string(k);
    // Stopped after a step in which experts moved, and after one in which they did not.
    live(overrides, 4, 2, own, kept[k]);
    live(overrides, 4, 3, own, kept[(k + 1) % kept.size()]);
    const Placed rest = live(overrides, 4, 6, own, kept[(k + 2) % kept.size()]);
    INFO("variant " << k);
    CHECK(differences(rest.state, whole.state).empty());
    REQUIRE(rest.stats.size() == 3);
    for (std::size_t i = 0; i < 3; ++i)
      CHECK(same_numbers(rest.stats[i], whole.stats[i + 3]));
  }
}

}  // namespace moesaic::test
