// optimizer.untouched=lazy: an expert without tokens is left alone, and has at its next use, and wherever it is looked at, the
// bits that it would have if every step had updated it.
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tests/support/catch.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

using Overrides = std::vector<std::string>;

constexpr std::int32_t kAway = 5, kExperts = 8;

// Gives every expert tokens, all of them in turn, but for one while it is away.
class Router final : public ChoiceObserver {
 public:
  ConstTensorView replace(const Choice& choice, Stream& stream) override {
    if (choice.layer.find("indexer") != std::string::npos) return {};
    stream.synchronize();
    memory_ = Buffer(choice.chosen.bytes(), kCpu, "given");
    const TensorView given = memory_.view(choice.chosen.shape(), DType::i32);
    std::int32_t next = 0;
    for (std::int64_t i = 0; i < given.numel(); ++i) {
      if (is_away && next == kAway) ++next;
      given.as<std::int32_t>()[i] = next;
      next = (next + 1) % kExperts;
    }
    return given;
  }
  bool is_away = false;

 private:
  Buffer memory_;
};

// Small steps: 16 tokens, two experts each.
Overrides with(const Overrides& more) {
  Overrides all{"data.sequence_length=16",
                "train.global_batch_size=1",
                "train.micro_batch_size=1",
                "train.steps=100",
                "train.eval_batches=2",
                "optimizer.lr_schedule=cosine",
                "optimizer.warmup_steps=2",
                "optimizer.ema_decay=0.9"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

const std::vector<Overrides> kKinds{
    {"optimizer.name=adamw"},
    {"optimizer.name=muon", "run.precision=bf16", "optimizer.master=split"},
    {"optimizer.name=adamw", "run.precision=bf16", "optimizer.master=f32"},
};
constexpr Offload kTight{.on_device = 0.3, .in_file = 0.4};

// Of a run whose expert is away in the steps (begin, end].
struct Story {
  int begin = 2, end = 2, steps = 0;
  std::function<void(Run& run, int steps_done)> between;  // steps
};

struct Told {
  std::vector<StepStats> stats;
  ExpertReplays replays;
  Snapshot state;
  std::int64_t storages = 0;  // with experts
};

Told tell(const Overrides& overrides, const std::optional<Offload>& offload, const Story& story) {
  Router router;
  Run run(hybrid_config(with(overrides)), nullptr, Stream::Mode::worker, kCpu, 0, offload);
  run.trainer->set_choices(&router);
  Told told;
  for (int step = 1; step <= story.steps; ++step) {
    router.is_away = story.begin < step && step <= story.end;
    told.stats.push_back(run.step());
    if (const auto& replays = told.stats.back().replays) {
      told.replays.members += replays->members;
      told.replays.steps += replays->steps;
    }
    if (story.between) story.between(run, step);
  }
  if (ExpertTiers* tiers = run.params->tiers()) {
    for (const TierGroup& group : tiers->groups())
      told.storages += static_cast<std::int64_t>(group.storages.size());
  }
  told.state = run.snapshot();
  return told;
}

// Replays of a storage with experts.
struct Expected {
  std::int64_t replays = 0, steps = 0;
};

void check_story(const Overrides& overrides, const Story& story, const Expected& expected) {
  INFO(fmt::format("away in steps {} to {} of {}: {}",
                   story.begin + 1,
                   story.end,
                   story.steps,
                   fmt::join(overrides, " ")));
  const auto untouched = [&](const char* how) {
    Overrides all = overrides;
    all.push_back(std::string("optimizer.untouched=") + how);
    return all;
  };
  const Told dense = tell(untouched("dense"), {}, story),
             lazy = tell(untouched("lazy"), kTight, story);
  REQUIRE(lazy.storages > 0);
  CHECK(lazy.replays.members == lazy.storages * expected.replays);
  CHECK(lazy.replays.steps == lazy.storages * expected.steps);
  for (std::size_t i = 0; i < dense.stats.size(); ++i)
    CHECK(same_numbers(lazy.stats[i], dense.stats[i]));
  CHECK(differences(lazy.state, dense.state).empty());
}

}  // namespace

TEST_CASE("lazy updates: an expert without tokens in 1, 2, 37 steps has the bits of a dense run") {
  for (const Overrides& kind : kKinds) {
    for (const int n : {1, 2, 37}) {
      check_story(kind, {.begin = 2, .end = 2 + n, .steps = 4 + n}, {1, n});
    }
  }
}

TEST_CASE("lazy updates: nobody falls behind further than scalars are kept") {
  // After 63 missed updates the 64th is made in its step, with them.
  check_story({"optimizer.name=adamw"}, {.begin = 1, .end = 71, .steps = 73}, {2, 63 + 6});
}

TEST_CASE(
    "lazy updates: a step that was skipped stays one, and what is still behind at the end is "
    "caught up") {
  for (const Overrides& kind : kKinds) {
    Overrides bad = kind;
    bad.emplace_back("debug.inject_nan_step=4");
    check_story(bad, {.begin = 2, .end = 6, .steps = 7}, {1, 4});
    check_story(bad, {.begin = 2, .end = 6, .steps = 6}, {0, 0});
  }
}

TEST_CASE("lazy updates: with a phase ends what its learning rates and frozen parts are about") {
  const std::string phases =
      "train.phases=[{until: 3}, {until: 5, lr_scale: [{pattern: '*.w1.weight', scale: 0.5}]}, "
      "{until: 7, freeze: ['*.w3.weight']}, {until: 9, freeze: ['*.experts.*']}, {until: 100}]";
  // The expert misses steps 2 and 3, 4 and 5, 6 and 7, 8 and 9, and 10. Frozen ones have no gradient and wait as well, for
  // their averages: each of the others is given that of step 8 in step 9, and that of step 9 with the phase's end.
  for (const Overrides& kind : kKinds) {
    Overrides all = kind;
    all.push_back(phases);
    check_story(all, {.begin = 1, .end = 10, .steps = 11}, {5 + 14, 9 + 14});
  }
}

TEST_CASE("lazy updates: a checkpoint and an evaluation see every expert up to date") {
  for (const Overrides& kind : kKinds) {
    std::vector<Snapshot> seen;
    const auto look = [&](Run& run, int step) {
      if (step == 4) seen.push_back(run.snapshot());
    };
    check_story(kind, {.begin = 2, .end = 6, .steps = 7, .between = look}, {2, 4});
    REQUIRE(seen.size() == 2);
    CHECK(differences(seen[1], seen[0]).empty());
    std::vector<double> losses;
    const auto evaluate = [&](Run& run, int step) {
      if (step != 5) return;
      losses.push_back(run.trainer->evaluate().loss);
    };
    const Told dense = tell(kind, {}, {.begin = 1, .end = 5, .steps = 5, .between = evaluate});
    Overrides lazy = kind;
    lazy.emplace_back("optimizer.untouched=lazy");
    const Told behind = tell(lazy, kTight, {.begin = 1, .end = 5, .steps = 5, .between = evaluate});
    REQUIRE(losses.size() == 2);
    CHECK(losses[0] == losses[1]);
    CHECK(differences(behind.state, dense.state).empty());
  }
}

TEST_CASE("lazy updates: a run is stopped while an expert is behind, and goes on in another way") {
  const Overrides kind = kKinds[1];
  Overrides lazy = kind;
  lazy.emplace_back("optimizer.untouched=lazy");
  const Told whole = tell(kind, {}, {.begin = 2, .end = 7, .steps = 8});
  for (const bool begins_lazy : {true, false}) {
    Snapshot at_stop;
    StateValues values;
    const auto stop = [&](Run& run, int step) {
      if (step != 5) return;
      at_stop = run.snapshot();
      values = run.trainer->values();
    };
    const std::optional<Offload> none;
    tell(begins_lazy ? lazy : kind,
         begins_lazy ? std::optional(kTight) : none,
         {.begin = 2, .end = 7, .steps = 5, .between = stop});
    Router router;
    Run rest(hybrid_config(with(begins_lazy ? kind : lazy)),
             nullptr,
             Stream::Mode::worker,
             kCpu,
             0,
             begins_lazy ? none : std::optional(kTight));
    rest.restore(at_stop, values);
    rest.trainer->set_choices(&router);
    for (int step = 6; step <= 8; ++step) {
      router.is_away = step <= 7;
      CHECK(same_numbers(rest.step(), whole.stats[static_cast<std::size_t>(step - 1)]));
    }
    CHECK(differences(rest.snapshot(), whole.state).empty());
  }
}

TEST_CASE("lazy updates: what experts miss is not moved") {
  std::map<std::string, std::uint64_t> uses[2];
  for (const bool is_lazy : {false, true}) {
    tell({is_lazy ? "optimizer.untouched=lazy" : "optimizer.untouched=dense"},
         kTight,
         {.begin = 2, .end = 12, .steps = 12, .between = [&](Run& run, int step) {
            if (step != 12) return;
            for (const TierCounters& c : run.params->tiers()->counters())
              uses[is_lazy ? 1 : 0][c.kind] += c.cache.uses;
          }});
  }
  CHECK(uses[1].at("states") < uses[0].at("states"));
  CHECK(uses[1].at("weights") < uses[0].at("weights"));
  CHECK(uses[1].at("gradients") == uses[0].at("gradients"));
}

TEST_CASE(
    "lazy updates: a trainer that ends makes none for nobody, and its store does not hide that") {
  for (const bool is_lazy : {false, true}) {
    for (const bool is_saved : {false, true}) {
      CAPTURE(is_lazy, is_saved);
      Router router;
      Run run(
          hybrid_config(with({is_lazy ? "optimizer.untouched=lazy" : "optimizer.untouched=dense"})),
          nullptr,
          Stream::Mode::worker,
          kCpu,
          0,
          kTight);
      run.trainer->set_choices(&router);
      for (int step = 1; step <= 5; ++step) {
        router.is_away = step > 1;
        run.step();
      }
      Snapshot saved;
      if (is_saved) saved = run.snapshot();
      ExpertTiers& tiers = *run.params->tiers();
      const auto uses = [&] {
        std::int64_t sum = 0;
        for (const TierCounters& c : tiers.counters())
          sum += static_cast<std::int64_t>(c.cache.uses);
        return sum;
      };
      const std::int64_t before = uses();
      run.trainer.reset();
      CHECK(uses() == before);
      const StorageId storage = tiers.groups().front().storages.back();
      const auto look = [&] {
        tiers.with_host(storage, kAway, {}, MemberAccess::read, [](const TensorView&) {});
      };
      if (is_saved) {
        CHECK_NOTHROW(look());
      } else {
        CHECK_THROWS_AS(look(), InternalError);
      }
    }
  }
}

}  // namespace moesaic::test
