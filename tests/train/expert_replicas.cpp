// Copies of busy experts on other ranks of their node: the same training, by name, with less for the busiest rank to do.
#include <mutex>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/train/expert_copier.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"
#include "tests/train/run.h"
#include "tests/train/skewed_run.h"

namespace moesaic::test {
namespace {

std::int64_t replicas(const std::vector<StepStats>& stats) {
  std::int64_t n = 0;
  for (const StepStats& s : stats) {
    for (const ExpertsMoved& m : s.moved)
      n += m.replicas;
  }
  return n;
}

// Against experts in order, which never move. Copies are there from the end of step 2 on.
void check_copied_run(std::vector<std::string> overrides, int ranks) {
  constexpr int kSteps = 5;
  INFO(fmt::format("{} ranks, {}", ranks, fmt::join(overrides, " ")));
  const Placed still = run_skewed(overrides, ranks, kSteps);
  overrides.emplace_back("experts.place_every=2");
  overrides.emplace_back("experts.replicas=2");
  const Placed copied = run_skewed(overrides, ranks, kSteps);
  CHECK(replicas(copied.stats) > 0);
  for (std::size_t i = 0; i < kSteps; ++i) {
    INFO("step " << i + 1);
    if (i == 0) CHECK(copied.stats[i].loss == still.stats[i].loss);
    CHECK(copied.stats[i].loss == Approx(still.stats[i].loss).epsilon(1e-9));
    CHECK(copied.stats[i].grad_norm == Approx(still.stats[i].grad_norm).epsilon(1e-9));
  }
  std::string worst;
  const double error = largest_relative_error(without_places(copied.state), still.state, worst);
  INFO("worst: " << worst);
  CHECK(error < 1e-7);
}

}  // namespace

TEST_CASE(
    "training with copies of experts is training without: optimizers, state whole or shared") {
  check_copied_run({"parallel.ep=2"}, 2);
  check_copied_run({"parallel.ep=2", "optimizer.name=muon", "optimizer.ema_decay=0.9"}, 4);
  check_copied_run({"parallel.ep=4", "parallel.zero=0", "optimizer.untouched=skip"}, 4);
  check_copied_run(
      {"parallel.ep=2", "train.phases=[{until: 3, freeze: ['*experts*']}, {until: 20}]"}, 4);
}

TEST_CASE("training with copies of experts is training without: other axes") {
  check_copied_run({"parallel.ep=2", "parallel.etp=2", "parallel.tp=2", "optimizer.name=muon"}, 4);
  check_copied_run({"parallel.ep=2", "parallel.cp=2", "train.micro_batch_size=2"}, 4);
}

TEST_CASE("training with copies of experts is training without: ways of their tokens") {
  check_copied_run({"parallel.ep=4", "dispatch.buffer_factor=1", "dispatch.exchange=flat"}, 4);
  check_copied_run({"parallel.ep=4", "comm.ranks_per_node=2", "dispatch.exchange=hierarchical"}, 4);
  check_copied_run({"parallel.ep=4", "comm.ranks_per_node=2", "dispatch.exchange=hdense"}, 4);
  check_copied_run({"parallel.ep=2",
                    "dispatch.exchange=flat",
                    "dispatch.overlap=true",
                    "dispatch.chunks=2",
                    "activations.recompute=[full]"},
                   2);
}

TEST_CASE("a skewed router: the busiest rank with placed experts, and with copies of them too") {
  const std::vector<std::string> placed{
      "parallel.ep=4", "experts.place_every=2", "model.num_experts=8"};
  const Placed alone = run_skewed(placed, 4, 4),
               copied = run_skewed(with(placed, "experts.replicas=2"), 4, 4);
  const double before = worst_rank(alone.stats[3]), after = worst_rank(copied.stats[3]);
  INFO(fmt::format("rank max/mean of the worst layer {:.2f} -> {:.2f}", before, after));
  CHECK(before > 1.3);
  CHECK(after < before - 0.15);
  for (const ExpertLoad& load : copied.stats[3].experts) {
    std::int64_t tokens = 0, of_ranks = 0;
    for (const std::int64_t n : load.tokens)
      tokens += n;
    for (const std::int64_t n : load.rank_tokens)
      of_ranks += n;
    CHECK(tokens == of_ranks);
  }
}

TEST_CASE("a node of one rank keeps no copies, and empty slots change nothing") {
  const std::vector<std::string> alone{
      "parallel.ep=4", "comm.ranks_per_node=1", "dispatch.exchange=flat", "experts.place_every=2"};
  const Placed without = run_skewed(alone, 4, 4),
               with_slots = run_skewed(with(alone, "experts.replicas=1"), 4, 4);
  CHECK(replicas(with_slots.stats) == 0);
  CHECK(differences(without_places(with_slots.state), without_places(without.state)).empty());
}

namespace {

const std::vector<std::string> kCopied{
    "parallel.ep=2", "optimizer.ema_decay=0.9", "experts.place_every=2", "experts.replicas=1"};

}  // namespace

TEST_CASE("a run with copies of experts, stopped after any step and continued, has the same bits") {
  for (const char* optimizer : {"adamw", "muon"}) {
    const auto overrides = with(kCopied, std::string("optimizer.name=") + optimizer);
    const TemporaryFolder folder("expert_replicas");
    const Placed whole = live(overrides, 4, 6, folder.path() / "whole");
    CHECK(replicas(whole.stats) > 0);
    for (const int stop : {1, 2, 3}) {
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

TEST_CASE("checkpoints of runs with copies load into any layout, and into runs without") {
  struct Next {
    int ranks;
    std::string layout, setting;
  };
  for (const Next& next : {Next{4, "parallel.ep=4", "experts.replicas=2"},
                           Next{1, "parallel.ep=1", "experts.replicas=1"},
                           Next{4, "parallel.ep=2", "experts.replicas=0"}}) {
    INFO(next.ranks << " ranks, " << next.layout << " " << next.setting);
    const TemporaryFolder folder("expert_replicas");
    const Placed saved = live(kCopied, 4, 3, folder.path());
    const auto overrides = with(with(kCopied, next.layout), next.setting);
    const Placed loaded = live(overrides, next.ranks, 3, folder.path());
    CHECK(differences(without_places(loaded.state), without_places(saved.state)).empty());
    const Placed on = live(overrides, next.ranks, 5, folder.path());
    const Placed back = live(kCopied, 4, 5, folder.path());
    CHECK(differences(without_places(back.state), without_places(on.state)).empty());
    CHECK(live(kCopied, 4, 6, folder.path()).stats.size() == 1);
  }
}

namespace {

// Never a part of another expression, whose rounding it could change.
[[gnu::noinline]] double value_of(double of, std::int64_t i) {
  return of + 0.001 * static_cast<double>(i);
}
// Sums whose bits depend on their order.
[[gnu::noinline]] double gradient(int of_rank, std::int32_t expert, bool is_home) {
  return (is_home ? 1.0 : 1e-16 * (of_rank + 1)) + 0.1 * expert;
}
void fill(const TensorView& view, double of) {
  for (std::int64_t i = 0; i < view.numel(); ++i)
    view.as<double>()[i] = value_of(of, i);
}

}  // namespace

TEST_CASE("weights go to copies, gradients go home and are added in the order of ranks") {
  constexpr std::int64_t kExperts = 8, kRows = 3, kCols = 5, kSize = kRows * kCols;
  const std::vector<double> load{40, 1, 6, 1, 1, 1, 6, 1};
  // All at once, and in windows that do not divide a slot.
  for (const std::size_t window : {std::size_t{1} << 20, std::size_t{7 * 8}}) {
    run_local_ranks(4, [&](Communicator& world) {
      const Mesh mesh(MeshConfig{.ep = 4}, world);
      ParameterStore params(kF64, mesh.position());
      const PlacesId places = params.declare_places(kExperts, 2);
      ParameterSpec spec{.name = "experts.{}.w", .shape = {kRows, kCols}, .members = kExperts};
      spec.places = places;
      spec.placement = {{{Axis::ep, 0}}, AxisFamily::expert};
      const StorageId id = params.declare(spec);
      params.seal(kCpu);
      params.initialize(1);
      BackendOwner owner({.mode = Stream::Mode::worker, .name = "copies"});
      const PlacesOfExperts homes{3, 1, 2, 0, 4, 5, 7, 6};
      params.set_places(places, homes, owner.stream());
      const ExpertCopies copies = balanced_copies(load, {1, 4}, homes, 2);
      params.set_copies(places, copies, owner.stream());
      owner.stream().synchronize();
      REQUIRE(copies.num_copies() >= 4);
      ExpertCopier copier(params, *mesh.group(Axis::ep).comm(), window);

      const int rank = world.rank();
      const TensorView weight = params.storage_weight(id), copied = params.copied_weight(id);
      for (std::int64_t m = 0; m < 2; ++m)
        fill(weight.rows(m, m + 1), 100 * (2 * rank + m));
      copier.send_weights(owner.stream());
      owner.stream().synchronize();
      for (std::int64_t slot = 0; slot < 2; ++slot) {
        const std::int32_t expert =
            copies.expert_of_slot[static_cast<std::size_t>(2 * rank + slot)];
        if (expert < 0) continue;
        for (std::int64_t i = 0; i < kSize; ++i)
          CHECK(copied.as<double>()[slot * kSize + i] ==
                value_of(100 * homes[static_cast<std::size_t>(expert)], i));
      }

      params.zero_grads(owner.stream());
      owner.stream().synchronize();
      for (std::int32_t e = 0; e < kExperts; ++e) {
        const std::int32_t home = homes[static_cast<std::size_t>(e)];
        if (home / 2 == rank)
          fill(params.grad(id).rows(home % 2, home % 2 + 1), gradient(rank, e, true));
      }
      for (std::int64_t slot = 0; slot < 2; ++slot) {
        const std::int32_t expert =
            copies.expert_of_slot[static_cast<std::size_t>(2 * rank + slot)];
        if (expert >= 0)
          fill(params.copied_gradient(id).rows(slot, slot + 1), gradient(rank, expert, false));
      }
      copier.begin_step();
      copier.gradients_final_from({0}, owner.backend());
      copier.gradients_final_from({0}, owner.backend());  // once a step
      owner.stream().synchronize();
      for (std::int32_t e = 0; e < kExperts; ++e) {
        const std::int32_t home = homes[static_cast<std::size_t>(e)];
        if (home / 2 != rank) continue;
        for (std::int64_t i = 0; i < kSize; ++i) {
          double want = value_of(gradient(rank, e, true), i);
          for (int r = 0; r < 4; ++r) {
            for (std::size_t slot = 0; slot < 2; ++slot) {
              if (copies.expert_of_slot[static_cast<std::size_t>(2 * r) + slot] == e)
                want += value_of(gradient(r, e, false), i);
            }
          }
          CHECK(params.grad(id).as<double>()[home % 2 * kSize + i] == want);
        }
      }
    });
  }
}

}  // namespace moesaic::test
