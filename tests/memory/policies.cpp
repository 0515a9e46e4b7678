#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <set>

#include "memory/tiers/cache_simulation.h"
#include "memory/tiers/policy.h"
#include "tests/memory/tier_support.h"

namespace moesaic::test {
namespace {

using namespace tiers;

// A log of one layer whose visits use one block each.
TouchLog log_of(const std::vector<Block>& uses, std::int32_t experts) {
  TouchLog log{.layers = 1, .experts = experts};
  for (const Block b : uses)
    log.entries.push_back({0, {0, VisitKind::forward, 0}, {b}});
  return log;
}

std::vector<Block> all_uses(const TouchLog& log) {
  std::vector<Block> uses;
  for (const auto& e : log.entries)
    uses.insert(uses.end(), e.blocks.begin(), e.blocks.end());
  return uses;
}

std::unique_ptr<CachePolicy> exact_sched(const TouchLog& log) {
  return make_sched_policy(std::make_unique<ExactForecast>(all_uses(log), log.blocks()));
}

std::unique_ptr<CachePolicy> sched(const TouchLog& log) {
  return make_sched_policy(
      std::make_unique<ScheduleForecast>(ScheduleForecast::Options{.step = log.schedule(),
                                                                   .layers = log.layers,
                                                                   .experts = log.experts,
                                                                   .updates = log.updates}));
}

/// One of each kind; the weights of the static one are for four blocks.
std::vector<std::unique_ptr<CachePolicy>> one_of_each(const TouchLog& log, std::uint64_t seed) {
  std::vector<std::unique_ptr<CachePolicy>> policies;
  policies.push_back(make_lru_policy());
  policies.push_back(exact_sched(log));
  policies.push_back(make_static_policy({1, 2, 3, 4}));
  policies.push_back(make_random_policy(seed));
  return policies;
}

std::int64_t hits(const TouchLog& log, std::unique_ptr<CachePolicy> policy, std::int64_t slots) {
  return simulate(log, *policy, {.slots = slots}).hits;
}

TEST_CASE("policies: cases counted by hand") {
  //                          0  1  0  2  1  0  0  3  1
  const TouchLog log = log_of({0, 1, 0, 2, 1, 0, 0, 3, 1}, 4);
  // lru of two: {0 1} hit 0, 2 for 1, 1 for 0, 0 for 2, hit 0, 3 for 1, 1 for 0.
  CHECK(hits(log, make_lru_policy(), 2) == 2);
  // {0 1} from the start and nothing else: 0, 1, 0, 0, 1 are hits; 2 and 3 pass.
  CHECK(belady(log, 2).hits == 5);
  CHECK(hits(log, exact_sched(log), 2) == 5);
  // The weights say 3 and 2: the free places go to 0 and 1 first; 2 pushes out 0 (the lightest), 3 then 1.
  auto fixed = make_static_policy({1, 2, 3, 4});
  const CacheCounts counts = simulate(log, *fixed, {.slots = 2});
  CHECK(counts.hits == 2);    // 0 at 2, 1 at 4
  CHECK(counts.passed == 3);  // 0 at 5 and 6, 1 at 8
  CHECK(counts.loads() == 7);
  for (const std::int64_t slots : {4, 100})  // room for all
    for (auto& policy : one_of_each(log, 3))
      CHECK(hits(log, std::move(policy), slots) == 5);
  CHECK(hits(log, make_lru_policy(), 0) == 0);
  CHECK(belady(log, 0).hits == 0);
}

TEST_CASE("policies: what is in use never goes; with nothing that may go the newcomer passes") {
  for (const auto& policy : one_of_each(log_of({0, 1, 2, 3, 0, 1, 2}, 4), 9)) {
    INFO(policy->name());
    const bool knows = policy->name() == std::string("sched");
    for (Block b = 0; b < 3; ++b) {
      policy->use(b);
      policy->admitted(b);
    }
    policy->use(3);
    for (int i = 0; i < 20; ++i) {
      CHECK(policy->victim(3, [](Block) { return false; }) == 3);
      const Block out = policy->victim(3, [](Block b) { return b == 1; });
      CHECK((out == 1 || (knows && out == 3)));  // 3 is never used again
    }
    policy->removed(1);
    policy->removed(1);  // what is not there may be removed
    for (int i = 0; i < 20; ++i)
      CHECK(policy->victim(3, [](Block) { return true; }) != 1);
  }
}

TEST_CASE("policies: random is of its seed, and gives every resident its turn") {
  const auto draws = [](std::uint64_t seed) {
    auto policy = make_random_policy(seed);
    for (Block b = 0; b < 8; ++b)
      policy->admitted(b);
    std::vector<Block> out;
    for (int i = 0; i < 800; ++i)
      out.push_back(policy->victim(8, [](Block) { return true; }));
    return out;
  };
  const auto first = draws(1);
  CHECK(first == draws(1));
  CHECK(first != draws(2));
  for (Block b = 0; b < 8; ++b) {
    const auto n = std::count(first.begin(), first.end(), b);
    CHECK((n > 60 && n < 140));
  }
}

// The most hits from use `at` on with this content of the cache, by trying everything.
std::int64_t best(const std::vector<Block>& uses,
                  std::size_t at,
                  std::set<Block> cache,
                  std::size_t slots,
                  std::map<std::pair<std::size_t, std::set<Block>>, std::int64_t>& known) {
  if (at == uses.size()) return 0;
  const auto key = std::pair(at, cache);
  if (const auto found = known.find(key); found != known.end()) return found->second;
  std::int64_t most = 0;
  if (cache.count(uses[at]) > 0) {
    most = 1 + best(uses, at + 1, cache, slots, known);
  } else {
    most = best(uses, at + 1, cache, slots, known);  // passes
    if (cache.size() < slots) {
      std::set<Block> larger = cache;
      larger.insert(uses[at]);
      most = std::max(most, best(uses, at + 1, larger, slots, known));
    }
    for (const Block out : cache) {
      std::set<Block> other = cache;
      other.erase(out);
      other.insert(uses[at]);
      most = std::max(most, best(uses, at + 1, other, slots, known));
    }
  }
  return known[key] = most;
}

TEST_CASE(
    "policies: Belady's rule finds what trying everything finds, and sched with hindsight does") {
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    const std::int32_t experts = 2 + static_cast<std::int32_t>(seed % 5);
    std::vector<Block> uses;
    for (std::uint64_t i = 0; i < 14; ++i)
      uses.push_back(static_cast<Block>(uniform(seed + 1, i) * uniform(seed + 99, i) * experts));
    const TouchLog log = log_of(uses, experts);
    for (std::size_t slots = 1; slots < 4; ++slots) {
      std::map<std::pair<std::size_t, std::set<Block>>, std::int64_t> known;
      const std::int64_t most = best(uses, 0, {}, slots, known);
      INFO("seed " << seed << " slots " << slots);
      REQUIRE(belady(log, static_cast<std::int64_t>(slots)).hits == most);
      REQUIRE(hits(log, exact_sched(log), static_cast<std::int64_t>(slots)) == most);
    }
  }
}

TouchOptions small_regime(std::uint64_t seed) {
  TouchOptions o{.layers = 5, .experts = 12, .top_k = 3, .micro_batches = 3, .steps = 8};
  o.seed = seed;
  o.tokens = seed % 3 == 0 ? 500 : seed % 3 == 1 ? 8 : 2;
  o.zipf = seed % 2 == 0 ? 0 : 1.5;
  o.drift = seed % 5 == 0 ? 0.3 : 0;
  o.order = seed % 4 == 0 ? VisitOrder::vertical : VisitOrder::horizontal;
  o.updates = seed % 3 == 0 ? Updates::dense : seed % 3 == 1 ? Updates::touched : Updates::none;
  return o;
}

TEST_CASE(
    "policies: none beats Belady's bound, sched with exact knowledge is at it, all repeat "
    "themselves") {
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    const TouchLog log = draw_touch_log(small_regime(seed));
    const std::vector<double> weights = use_counts(log, 3);
    for (const std::int64_t slots : {1, 6, 15, 30, 59, 60}) {
      INFO("seed " << seed << " slots " << slots);
      const CacheCounts bound = belady(log, slots);
      REQUIRE(bound.uses == static_cast<std::int64_t>(all_uses(log).size()));
      REQUIRE(hits(log, exact_sched(log), slots) == bound.hits);
      const std::vector<std::function<std::unique_ptr<CachePolicy>()>> makers{
          [&] { return sched(log); },
          [] { return make_lru_policy(); },
          [&] { return make_static_policy(weights); },
          [&] { return make_static_policy(even_weights(log.layers, log.experts)); },
          [&] { return make_random_policy(seed); }};
      for (const auto& make : makers) {
        const auto policy = make();
        const CacheCounts counts = simulate(log, *policy, {.slots = slots});
        INFO(policy->name());
        REQUIRE(counts.hits <= bound.hits);
        REQUIRE(counts.uses == bound.uses);
        REQUIRE(simulate(log, *make(), {.slots = slots}) == counts);
        if (slots == 60) REQUIRE(counts.hits == bound.hits);
      }
    }
  }
}

TEST_CASE(
    "policies: with everything used, forward and back, lru and sched hit the share that fits, the "
    "optimum") {
  TouchOptions o{
      .layers = 6, .experts = 8, .top_k = 8, .tokens = 64, .micro_batches = 2, .steps = 6};
  const TouchLog log = draw_touch_log(o);
  for (const std::int64_t slots : {4, 12, 24, 36}) {
    const auto lru = make_lru_policy(), knowing = sched(log), chance = make_random_policy(1);
    const SimulationOptions s{.slots = slots, .first_counted_step = 2};
    const std::int64_t share = 2 * slots * 2 * 4;  // at both turns of 2 micro-batches of 4 steps
    CHECK(simulate(log, *lru, s).hits == share);
    CHECK(simulate(log, *knowing, s).hits == share);
    CHECK(simulate(log, *chance, s).hits < share);
    CHECK(belady(log, slots, 2).hits == share);
  }
}

TEST_CASE("policies: sched is level with lru and frequency or ahead of them, and near the bound") {
  struct Regime {
    std::int32_t experts;
    std::int64_t top_k, tokens;
    double zipf;
    VisitOrder order;
  };
  for (const Regime& r : {Regime{64, 8, 2048, 0, VisitOrder::horizontal},
                          Regime{64, 4, 128, 1.2, VisitOrder::horizontal},
                          Regime{64, 4, 16, 1.0, VisitOrder::horizontal},
                          Regime{64, 4, 128, 2.0, VisitOrder::horizontal},
                          Regime{64, 4, 128, 2.0, VisitOrder::vertical}}) {
    TouchOptions o{.layers = 12, .experts = r.experts, .top_k = r.top_k, .tokens = r.tokens};
    o.zipf = r.zipf;
    o.order = r.order;
    const TouchLog log = draw_touch_log(o);
    for (const double share : {0.1, 0.25, 0.5, 0.75}) {
      const auto slots = static_cast<std::int64_t>(share * static_cast<double>(log.blocks()));
      const SimulationOptions s{.slots = slots, .first_counted_step = 4};
      const auto rate = [&](const std::unique_ptr<CachePolicy>& policy) {
        return simulate(log, *policy, s).hit_rate();
      };
      const double knowing = rate(sched(log)), lru = rate(make_lru_policy()),
                   fixed = rate(make_static_policy(use_counts(log, 4)));
      const double bound = belady(log, slots, 4).hit_rate();
      INFO(r.experts << " experts, " << r.tokens << " tokens, zipf " << r.zipf << ", share "
                     << share << ": sched " << knowing << " lru " << lru << " static " << fixed
                     << " bound " << bound);
      CHECK(knowing > lru - 0.01);
      CHECK(knowing > fixed - 0.01);
      CHECK(knowing > bound - 0.08);
    }
  }
}

Visit forward(std::int32_t layer, std::int32_t micro_batch = 0) {
  return {layer, VisitKind::forward, micro_batch};
}
Visit backward(std::int32_t layer, std::int32_t micro_batch = 0) {
  return {layer, VisitKind::backward, micro_batch};
}
Visit update(std::int32_t layer) {
  return {layer, VisitKind::update, 0};
}

/// The visit with all that it uses.
void play(ScheduleForecast& f, const Visit& visit, const std::vector<Block>& blocks) {
  f.begin_visit(visit, blocks);
  for (const Block b : blocks)
    f.used(b);
}

ScheduleForecast forecast_of(const std::vector<Visit>& step, Updates updates) {
  return ScheduleForecast({.step = step, .layers = 3, .experts = 4, .updates = updates});
}

TEST_CASE("forecast: what forward chose comes back in backward, what comes then is expected") {
  const auto step = step_visits(3, 1, VisitOrder::horizontal, Updates::none);  // F0 F1 F2 B2 B1 B0
  ScheduleForecast f = forecast_of(step, Updates::none);
  const std::vector<Block> one{1, 2};
  CHECK(f.begin_visit(step[0], one).end == 4);
  CHECK(f.next_use(1) == 0.25);  // now
  f.used(1);
  CHECK(f.next_use(1) == 5.5);  // B0 is visit 5; expert 1 is the third of four there
  CHECK(f.next_use(2) == 0.5);
  // Expert 3 was not chosen: p fell from 1 to 0.8; one more forward in four is to be waited for, of 6 visits.
  CHECK(f.touch_probability(3) == Approx(0.8));
  CHECK(f.next_use(3) == Approx(6.75 + 0.25 * 6));
  CHECK(f.next_use(4) == 1);  // layer 1: nothing known, p is 1
  const auto seen = f.foresee(5, 1);
  // Layers 1 and 2 have p 1; in B0 the two that were chosen, descending.
  REQUIRE(seen.size() == 4 * 4 + 2);
  CHECK(seen[0].block == 4);
  CHECK(seen[16].block == 2);
  CHECK(seen[17].block == 1);
  const std::vector<Block> none;
  for (std::size_t i = 1; i < 5; ++i)
    f.begin_visit(step[i], none);
  CHECK(f.foresee(1, 1).size() == 2);
  const std::vector<Block> back{2, 1};
  f.begin_visit(step[5], back);
  f.used(2);
  f.used(1);
  CHECK(f.next_use(1) == 6.25);                                  // p is 1: the next forward
  CHECK(f.next_use(3) == Approx(6.75 + 0.25 * 6));               // stays expected
  CHECK(f.next_use(8) == Approx(8 + 0.25 * 6));                  // layer 2 was visited without it
  CHECK_THROWS_AS(f.begin_visit(step[3], none), InternalError);  // not the schedule's next
}

TEST_CASE(
    "forecast: a forward of another micro-batch may come before the backward, and updates count") {
  // F0(0) F0(1) B0(0) B0(1) U0: one layer, interleaved micro-batches as a pipeline has them.
  const std::vector<Visit> step{forward(0), forward(0, 1), backward(0), backward(0, 1), update(0)};
  ScheduleForecast f = forecast_of(step, Updates::touched);
  const std::vector<Block> first{0}, second{1};
  play(f, step[0], first);
  CHECK(f.next_use(0) == 1);  // p is 1: the next forward is expected to use it
  play(f, step[1], second);
  CHECK(f.next_use(0) == 2.75);  // B(0)
  CHECK(f.next_use(1) == 3.5);   // B(1)
  play(f, step[2], first);
  CHECK(f.next_use(0) == 4);  // its update, before the next forward
  CHECK(f.foresee(1, 1).size() == 1);
  const std::vector<Block> both{0, 1};
  f.begin_visit(step[3], second);
  CHECK(f.foresee(1, 1).size() == 2);
  f.begin_visit(step[4], both);
  f.used(0);
  CHECK(f.next_use(0) == Approx(5 + (1 / 0.8 - 1) * 2.5));
  ScheduleForecast dense = forecast_of(step, Updates::dense);
  dense.begin_visit(step[0], first);
  dense.begin_visit(step[1], second);
  CHECK(dense.next_use(3) == 4.75);  // used by nobody, and updated
}

TEST_CASE("forecast: an update of what was touched may be the next step's first visit") {
  // U0 F0(0) F0(1) B0(1) B0(0): what forward chose is updated beside the next one.
  const std::vector<Visit> step{update(0), forward(0), forward(0, 1), backward(0, 1), backward(0)};
  ScheduleForecast f = forecast_of(step, Updates::touched);
  const std::vector<Block> first{0}, second{1}, both{0, 1}, none;
  f.begin_visit(step[1], first);  // nothing to update yet
  f.begin_visit(step[2], second);
  play(f, step[3], second);
  CHECK(f.next_use(1) == 5.25);
  play(f, step[4], first);
  CHECK(f.next_use(0) == 5);
  CHECK(f.foresee(1, 1).size() == 2);
  CHECK(f.foresee(1, 0.5).size() == 2);  // the others, which may be drawn again, are not updated
  f.begin_visit(step[0], both);
  f.used(0);
  CHECK(f.next_use(0) == Approx(6 + (1 / 0.8 - 1) * 2.5));
  f.begin_visit(step[1], none);
  f.begin_visit(step[2], first);
  f.begin_visit(step[3], first);
  f.begin_visit(step[4], none);
  CHECK(f.next_use(0) == 10);
  CHECK(f.next_use(1) > 11);  // not touched, not updated
}

TEST_CASE("forecast: updates may come between the parts of a visit") {
  // F0 U1 F1 B1 B0 U0: layer 1 is updated as soon as something of F0 is under way.
  const std::vector<Visit> step{
      forward(0), update(1), forward(1), backward(1), backward(0), update(0)};
  for (const Updates updates : {Updates::dense, Updates::touched}) {
    ScheduleForecast f = forecast_of(step, updates);
    const std::vector<Block> first{0}, second{0, 2}, none;
    play(f, step[0], first);
    f.begin_visit(step[1], none);
    f.begin_visit(step[0], second);
    CHECK(f.next_use(2) < 2);  // now
    f.used(0);
    f.used(2);
    CHECK(f.next_use(0) == 4.75);  // B0
    CHECK(f.next_use(2) == 4.25);
    CHECK(f.touch_probability(0) == Approx(1));
    CHECK(f.touch_probability(1) == Approx(0.8));
    f.begin_visit(step[2], none);
    CHECK_THROWS_AS(f.begin_visit(step[0], first), InternalError);
  }
}

TEST_CASE("forecast: a visit in several parts counts once, with the experts of all of them") {
  const auto step = step_visits(3, 1, VisitOrder::horizontal, Updates::touched);
  ScheduleForecast whole = forecast_of(step, Updates::touched),
                   parts = forecast_of(step, Updates::touched);
  const std::vector<Block> first{0, 2}, second{2, 3}, both{0, 2, 3};
  for (int round = 0; round < 3; ++round) {
    for (const Visit& visit : step) {
      const Block begin = visit.layer * 4;
      const auto of_layer = [&](std::vector<Block> blocks) {
        for (Block& b : blocks)
          b += begin;
        return blocks;
      };
      whole.begin_visit(visit, of_layer(both));
      parts.begin_visit(visit, of_layer(first));
      for (const Block b : of_layer(first))
        parts.used(b);
      parts.begin_visit(visit, of_layer(second));
      CHECK(parts.next_use(begin + 2) == whole.next_use(begin + 2));  // now, once more
      for (const Block b : of_layer(second))
        parts.used(b);
      for (const Block b : of_layer(both))
        whole.used(b);
      for (Block b = 0; b < 12; ++b) {
        CHECK(parts.next_use(b) == whole.next_use(b));
        CHECK(parts.touch_probability(b) == whole.touch_probability(b));
      }
      const auto a = whole.foresee(4, 0.5), b = parts.foresee(4, 0.5);
      REQUIRE(a.size() == b.size());
      for (std::size_t i = 0; i < a.size(); ++i)
        CHECK((a[i].block == b[i].block && a[i].probability == b[i].probability));
    }
  }
  CHECK(whole.touch_probability(1) == Approx(0.8 * 0.8 * 0.8));
  CHECK(whole.touch_probability(3) == Approx(1));
}

TEST_CASE("forecast: an update may be left out, nothing else") {
  const auto step = step_visits(3, 1, VisitOrder::horizontal, Updates::dense);
  ScheduleForecast f = forecast_of(step, Updates::dense);
  const std::vector<Block> none;
  for (std::size_t i = 0; i < 6; ++i)
    f.begin_visit(step[i], none);
  f.begin_visit(step[7], none);  // without U2
  CHECK(f.next_use(0) == 8);     // U0
  f.begin_visit(step[0], none);  // without U0
  CHECK_THROWS_AS(f.begin_visit(step[2], none), InternalError);
  f.begin_visit(step[1], none);
}

TEST_CASE("forecast: two visits of the schedule that are alike follow each other") {
  const std::vector<Visit> step{forward(0), forward(0)};
  ScheduleForecast f = forecast_of(step, Updates::none);
  const std::vector<Block> one{1};
  play(f, step[0], one);
  CHECK(f.next_use(1) == 1.25);
  play(f, step[1], one);
  CHECK(f.next_use(1) == 2.25);
}

TEST_CASE("forecast: gradients are drawn by backward, and layers may be left out") {
  // B2 B1 B0 twice, then the updates of what has a gradient.
  std::vector<Visit> step;
  for (const Visit& v : step_visits(3, 2, VisitOrder::horizontal, Updates::touched))
    if (v.kind != VisitKind::forward) step.push_back(v);
  ScheduleForecast f({.step = step,
                      .layers = 3,
                      .experts = 4,
                      .updates = Updates::touched,
                      .draws = VisitKind::backward,
                      .may_skip = true});
  const std::vector<Block> one{9}, none;
  play(f, step[0], one);
  CHECK(f.next_use(9) == 3.5);                        // p is 1: B2 of the second micro-batch
  CHECK(f.next_use(8) == Approx(3.75 + 0.25 * 4.5));  // has none yet
  // Layer 1 is frozen: B0 comes next.
  f.begin_visit(step[2], none);
  f.begin_visit(step[3], none);
  CHECK(f.next_use(9) == 6.25);  // U2, which is certain
  f.begin_visit(step[5], none);
  play(f, step[6], one);
  f.begin_visit(step[8], none);
  f.begin_visit(step[0], one);  // the next step
  CHECK(f.next_use(9) == 9.5);
  CHECK_THROWS_AS(f.begin_visit(forward(1), none), InternalError);
}

}  // namespace
}  // namespace moesaic::test
