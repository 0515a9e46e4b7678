// Offloaded experts against resident ones: the same visits, the same bits.
#include "tests/nn/expert_tiers_steps.h"

namespace moesaic::test {
namespace {

// What resident experts give.
const std::vector<std::byte>& wanted(const Run& run) {
  static std::map<std::pair<int, bool>, std::vector<std::byte>> known;
  auto& log = known[{static_cast<int>(run.precision.compute), run.precision.split_masters}];
  if (log.empty())
    log = resident({.precision = run.precision, .mode = Stream::Mode::immediate}, kCpu).log;
  return log;
}
bool is_same(const Run& run) {
  return offloaded(run, kCpu).log == wanted(run);
}

}  // namespace

TEST_CASE("expert tiers: the bits of resident experts, at any budget and with any policy") {
  for (const TierPolicy policy :
       {TierPolicy::sched, TierPolicy::lru, TierPolicy::fixed, TierPolicy::random}) {
    for (const std::int64_t slots : {3, 5, 9, 18, 21}) {
      Run run{.policy = policy, .seed = static_cast<std::uint64_t>(slots), .slots = slots};
      run.precision = slots == 5 ? kSplit : slots == 9 ? kBf16 : kF32;
      run.in_file = slots == 3 ? 18 : slots == 5 ? 4 : slots == 9 ? 11 : 0;
      INFO("policy " << static_cast<int>(policy) << ", slots " << slots);
      const Outcome outcome = offloaded(run, kCpu);
      CHECK(outcome.log == wanted(run));
      for (const TierCounters& c : outcome.counters) {
        INFO(c.group << " " << c.kind);
        CHECK(c.cache.uses > 0);
        CHECK(c.cache.hits <= c.cache.uses);
        if (slots >= 18 && c.kind == "weights") CHECK(c.cache.loads == 18);
        if (slots >= 18 && c.kind == "gradients") CHECK(c.cache.bytes_up == 0);
        CHECK((run.in_file > 0 && c.kind != "gradients") == (c.file_bytes_written > 0));
      }
    }
  }
}

TEST_CASE("expert tiers: a store without the schedule, streams that run at once, states alone") {
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    Run run{.policy = TierPolicy::random, .seed = seed, .slots = 4, .in_file = 5};
    run.precision = seed % 2 == 0 ? kSplit : kF64;
    CHECK(is_same(run));
  }
  CHECK(is_same({.slots = 4, .schedule = false}));
  CHECK(is_same({.slots = 4, .mode = Stream::Mode::immediate}));
  CHECK(is_same({.slots = 6, .updates = tiers::Updates::none}));
  for (const Precision& precision : {kF32, kBf16, kSplit}) {
    const Run run{.precision = precision, .weights = false, .slots = 4, .in_file = 7};
    const Outcome outcome = offloaded(run, kCpu);
    CHECK(outcome.log == wanted(run));
    REQUIRE(outcome.counters.size() == 2);
    CHECK(outcome.counters[1].kind == "states");
  }
}

TEST_CASE("expert tiers: members that live on the device alone") {
  for (const std::int64_t on_device : {1, 7, 15, 18}) {
    for (const bool weights : {true, false}) {
      const Run run{.precision = on_device == 7 ? kSplit : kBf16,
                    .weights = weights,
                    .policy = on_device == 15 ? TierPolicy::fixed : TierPolicy::sched,
                    .slots = on_device == 18 ? 0 : 3,
                    .in_file = on_device < 15 ? 3 : 0,
                    .on_device = on_device};
      INFO(on_device << " of 18 on the device" << (weights ? "" : ", states alone"));
      const Outcome outcome = offloaded(run, kCpu);
      CHECK(outcome.log == wanted(run));
      for (const TierCounters& c : outcome.counters) {
        INFO(c.group << " " << c.kind);
        if (on_device == 18) CHECK(c.cache.bytes_up + c.cache.bytes_down == 0);
        if (on_device < 15) CHECK(c.cache.bytes_down > 0);
      }
    }
  }
}

}  // namespace moesaic::test
