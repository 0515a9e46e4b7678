// Steps like those of training through all tiers, at the smallest budgets, against plain memory.
#include "memory/tiers/device_cache.h"

#include <atomic>
#include <chrono>
#include <future>
#include <thread>

#include "memory/tiers/cache_simulation.h"
#include "tests/memory/block_support.h"

namespace moesaic::test {
namespace {

struct TrainingRun {
  int policy = 0;  // 0 to 2: policy_of(); 3: sched
  std::int64_t slots = 3;
  int in_file_of_4 = 0, on_device_of_4 = 0;
  Stream::Mode mode = Stream::Mode::worker;
  bool delays = false, prefetches = false;
};
struct TrainingResult {
  int wrong = 0;
  std::vector<std::uint64_t> moves;  // of both caches after every visit
  std::uint64_t hits = 0, uses = 0, bytes = 0;
};

// Steps like those of training: forward and backward read weights, an update reads and writes weights and states.
TrainingResult train(const TouchLog& log, const TrainingRun& run) {
  const TemporaryFolder folder("tiers_train");
  const Block blocks = log.blocks();
  HomeTiers homes(layout(),
                  home_options(folder.path(), blocks, run.in_file_of_4, 3, run.on_device_of_4));
  fill_homes(homes);
  std::vector<Block> on_device;
  for (Block b = 0; b < blocks; ++b)
    if (homes.lives_on_device(b)) on_device.push_back(b);
  const auto lasting = static_cast<std::int64_t>(on_device.size());
  Versions versions(blocks);
  const auto policy = [&] {
    return run.policy < 3 ? policy_of(run.policy, 4)
                          : make_sched_policy(std::make_unique<ScheduleForecast>(
                                ScheduleForecast::Options{.step = log.schedule(),
                                                          .layers = log.layers,
                                                          .experts = log.experts,
                                                          .updates = log.updates}));
  };
  DeviceCache weights(homes,
                      {.range = {0, 1},
                       .slots = lasting + (lasting < blocks ? run.slots : 0),
                       .transit = 1,
                       .mode = run.mode,
                       .poison = true},
                      policy());
  DeviceCache states(homes,
                     {.range = {1, 3},
                      .slots = lasting + (lasting < blocks ? 3 : 0),
                      .transit = 2,
                      .mode = run.mode,
                      .poison = true},
                     make_lru_policy());
  Stream compute(kCpu, "compute", run.mode);
  std::atomic<int> wrong{0};
  TrainingResult result;
  std::uint64_t draws = 0;
  const auto delay = [&](Stream& stream) {
    if (!run.delays || uniform(1, draws++) > 0.05) return;
    stream.enqueue([] { std::this_thread::sleep_for(std::chrono::microseconds(150)); });
  };
  const auto read = [&](const std::byte* at, Block b, int s) {
    const std::uint64_t version = versions.at(b, s);
    compute.enqueue([=, &wrong] {
      if (!moesaic::test::holds(at, b, s, version)) ++wrong;
    });
  };
  const auto write = [&](std::byte* at, Block b, int s) {
    const std::uint64_t version = ++versions.at(b, s);
    compute.enqueue([=] { put(at, b, s, version); });
  };
  // What lives on the device gets its first values there.
  for (const Block b : on_device) {
    for (DeviceCache* cache : {&weights, &states}) {
      const SectionRange sections = cache == &weights ? SectionRange{0, 1} : SectionRange{1, 3};
      const std::int64_t slot =
          cache->acquire(b, Access::write, compute, DeviceCache::Contents::replaced);
      for (int s = sections.first; s < sections.end(); ++s)
        compute.enqueue([=, at = cache->data(slot, s)] { put(at, b, s, 0); });
      cache->release(b, Access::write, compute, sections);
    }
  }
  const std::uint64_t uses_before = weights.counters().uses;
  for (const TouchLog::Entry& entry : log.entries) {
    weights.begin_visit(entry.visit, entry.blocks);
    const bool updates = entry.visit.kind == VisitKind::update;
    for (const Block b : entry.blocks) {
      const Access access = updates ? Access::write : Access::read;
      std::byte* w = weights.data(weights.acquire(b, access, compute), 0);
      delay(weights.load_stream());
      delay(compute);
      read(w, b, 0);
      if (updates) {
        const std::int64_t slot = states.acquire(b, Access::write, compute);
        delay(states.write_stream());
        for (int s = 1; s < 4; ++s) {
          std::byte* at = states.data(slot, s);
          read(at, b, s);
          write(at, b, s);
        }
        write(w, b, 0);
        states.release(b, Access::write, compute, SectionRange{1, 3});
        states.write_back(b);
        weights.release(b, Access::write, compute, SectionRange{0, 1});
        weights.write_back(b);
      } else {
        weights.release(b, Access::read, compute);
      }
    }
    if (run.prefetches)
      for (const Foreseen& f : weights.foresee(1, 0.5))
        if (!weights.prefetch(f.block)) break;
    result.moves.push_back(weights.counters().loads);
    result.moves.push_back(weights.counters().bytes_down);
  }
  weights.flush();
  states.flush();
  for (const Block b : on_device) {
    read(weights.data(weights.acquire(b, Access::read, compute), 0), b, 0);
    weights.release(b, Access::read, compute);
    const std::int64_t slot = states.acquire(b, Access::read, compute);
    for (int s = 1; s < 4; ++s)
      read(states.data(slot, s), b, s);
    states.release(b, Access::read, compute);
  }
  compute.synchronize();
  check_homes(homes, versions);
  result.wrong = wrong;
  result.hits = weights.counters().hits;
  result.uses = weights.counters().uses - uses_before;
  for (const DeviceCache* cache : {&weights, &states})
    result.bytes += cache->counters().bytes_up + cache->counters().bytes_down;
  return result;
}

TouchLog training_log(VisitOrder order, Updates updates) {
  TouchOptions o{
      .layers = 3, .experts = 6, .top_k = 2, .tokens = 4, .micro_batches = 2, .steps = 3};
  o.zipf = 1;
  o.order = order;
  o.updates = updates;
  return draw_touch_log(o);
}

TEST_CASE(
    "tiers: training reads what it wrote, at any budget, with any policy, order and placing") {
  for (const VisitOrder order : {VisitOrder::horizontal, VisitOrder::vertical}) {
    for (const Updates updates : {Updates::touched, Updates::dense}) {
      const TouchLog log = training_log(order, updates);
      for (int policy = 0; policy < 4; ++policy) {
        for (const std::int64_t slots : {3, 6, 19}) {
          const TrainingRun run{.policy = policy,
                                .slots = slots,
                                .in_file_of_4 = static_cast<int>(slots % 4) + 1,
                                .delays = policy % 2 == 0,
                                .prefetches = slots != 6};
          INFO("policy " << policy << ", slots " << slots);
          const TrainingResult result = train(log, run);
          CHECK(result.wrong == 0);
          const CacheCounts bound = belady(log, slots);
          CHECK(result.uses == static_cast<std::uint64_t>(bound.uses));
          if (!run.prefetches) CHECK(result.hits <= static_cast<std::uint64_t>(bound.hits));
        }
      }
    }
  }
}

TEST_CASE("tiers: blocks that live on the device stay there, and cost no transfer and no home") {
  for (const VisitOrder order : {VisitOrder::horizontal, VisitOrder::vertical}) {
    const TouchLog log = training_log(order, Updates::dense);
    std::uint64_t bytes = ~std::uint64_t{0};
    for (const int on_device : {0, 1, 3, 4}) {
      for (int policy = 0; policy < 4; ++policy) {
        const TrainingResult result = train(log,
                                            {.policy = policy,
                                             .slots = 3,
                                             .in_file_of_4 = on_device < 3 ? 1 : 0,
                                             .on_device_of_4 = on_device,
                                             .delays = policy == 0,
                                             .prefetches = policy == 3});
        INFO(on_device << " of 4 blocks on the device, policy " << policy);
        CHECK(result.wrong == 0);
        if (on_device == 4) CHECK(result.bytes == 0);
        if (policy == 1) {
          CHECK(result.bytes < bytes);
          bytes = result.bytes;
        }
      }
    }
  }
  const TemporaryFolder folder("tiers_lasting");
  HomeTiers homes(layout(), home_options(folder.path(), 4, 0, 2, 1));
  CHECK_THROWS_AS(homes.lease(3, layout().all(), HomeTiers::Contents::needed), InternalError);
  DeviceCache cache(homes, {.range = {0, 1}, .slots = 4, .transit = 1}, make_lru_policy());
  Stream user(kCpu, "user");
  CHECK_THROWS_AS(cache.acquire(3, Access::read, user), InternalError);  // without values
  cache.acquire(3, Access::write, user, DeviceCache::Contents::replaced);
  cache.release(3, Access::write, user, SectionRange{0, 1});
  CHECK(cache.keeps(3));
  cache.discard();
  CHECK_THROWS_AS(cache.acquire(3, Access::read, user), InternalError);  // nobody has them any more
  CHECK_THROWS_AS(
      DeviceCache(homes, {.range = {0, 1}, .slots = 3, .transit = 1}, make_lru_policy()),
      InternalError);
}

TEST_CASE(
    "tiers: what moves depends on the order of uses, not on time; the simulation counts the same") {
  const TouchLog log = training_log(VisitOrder::horizontal, Updates::touched);
  for (int policy = 0; policy < 4; ++policy) {
    const TrainingRun run{
        .policy = policy, .slots = 8, .in_file_of_4 = 2, .mode = Stream::Mode::immediate};
    const TrainingResult calm = train(log, run);
    TrainingRun hurried = run;
    hurried.mode = Stream::Mode::worker;
    hurried.delays = true;
    hurried.in_file_of_4 = 4;
    const TrainingResult other = train(log, hurried);
    CHECK(calm.wrong + other.wrong == 0);
    CHECK(calm.moves == other.moves);
    if (policy == 1) {  // never passes a block through transit, where it may be hit, too
      const auto lru = make_lru_policy();
      CHECK(calm.hits == static_cast<std::uint64_t>(simulate(log, *lru, {.slots = 7}).hits));
    }
  }
}

TEST_CASE("tiers: who works beside the main user waits for no slot and no copy of his") {
  const TemporaryFolder folder("tiers_lanes");
  HomeTiers homes(layout(), home_options(folder.path(), 24, 0, 2));
  fill_homes(homes);
  using Lane = DeviceCache::Lane;
  DeviceCache cache(
      homes,
      {.range = {0, 1}, .slots = 8, .transit = 6, .transit_beside = 2, .poison = true},
      make_lru_policy());
  Stream forward(kCpu, "forward"), update(kCpu, "update");
  std::promise<void> gate;
  forward.enqueue([open = gate.get_future().share()] { open.wait(); });
  std::atomic<int> wrong{0};
  const auto read = [&](Block b, Lane lane, Stream& user, std::uint64_t version) {
    const std::byte* at =
        cache.data(cache.acquire(b, Access::read, user, DeviceCache::Contents::loaded, lane), 0);
    user.enqueue([=, &wrong] { wrong += moesaic::test::holds(at, b, 0, version) ? 0 : 1; });
    cache.release(b, Access::read, user);
  };
  // More blocks than the main user has slots, all waiting for the gate, and loads behind them.
  for (Block b = 0; b < 12; ++b)
    read(b, Lane::main, forward, 0);
  for (Block b = 12; b < 24; ++b) {
    std::byte* at = cache.data(
        cache.acquire(b, Access::write, update, DeviceCache::Contents::loaded, Lane::beside), 0);
    update.enqueue([=, &wrong] {
      wrong += moesaic::test::holds(at, b, 0, 0) ? 0 : 1;
      put(at, b, 0, 1);
    });
    cache.release(b, Access::write, update, SectionRange{0, 1});
    cache.write_back(b, Lane::beside);
    CHECK(!cache.keeps(b));  // what stays is chosen for the main user
  }
  Event over(kCpu);
  update.record(over);
  for (int i = 0; i < 1000 && !over.reached(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK(over.reached());
  // The main user sees what was changed, wherever it is.
  for (Block b = 12; b < 24; ++b)
    read(b, Lane::main, forward, 1);
  gate.set_value();
  forward.synchronize();
  CHECK(wrong == 0);
  CHECK_THROWS_AS(DeviceCache(homes,
                              {.range = {0, 1}, .slots = 4, .transit = 2, .transit_beside = 2},
                              make_lru_policy()),
                  InternalError);
}

TEST_CASE(
    "tiers: all slots in use at once is an error with the number, and values can be replaced from "
    "below") {
  const TemporaryFolder folder("tiers_slots");
  HomeTiers homes(layout(), home_options(folder.path(), 8, 2, 2));
  fill_homes(homes);
  Versions versions(8);
  DeviceCache cache(
      homes, {.range = {0, 1}, .slots = 3, .transit = 3, .poison = true}, make_lru_policy());
  Stream user(kCpu, "user");
  for (Block b = 0; b < 3; ++b)
    cache.acquire(b, Access::read, user);
  CHECK(contains(message_of<ResourceError>([&] { cache.acquire(3, Access::read, user); }),
                 "all 3 slots of 'expert cache' (5000 bytes each) are in use at once"));
  CHECK(!cache.prefetch(3));
  for (Block b = 0; b < 3; ++b) {
    CHECK(cache.holds(b));  // nobody's copy was taken away
    cache.release(b, Access::read, user);
  }
  // Changed, and then overtaken by a checkpoint: the homes get other values, the copies are given up.
  std::byte* at = cache.data(cache.acquire(1, Access::write, user), 0);
  user.enqueue([at] { put(at, 1, 0, 5); });
  cache.release(1, Access::write, user, SectionRange{0, 1});
  cache.discard();
  CHECK(cache.resident() == 0);
  fill_homes(homes);
  at = cache.data(cache.acquire(1, Access::read, user), 0);
  std::atomic<bool> right{false};
  user.enqueue([at, &right] { right = moesaic::test::holds(at, 1, 0, 0); });
  cache.release(1, Access::read, user);
  user.synchronize();
  CHECK(right);
  check_homes(homes, versions);
  CHECK_THROWS_AS(cache.release(1, Access::read, user), InternalError);
  CHECK_THROWS_AS(cache.acquire(1, Access::read, user, DeviceCache::Contents::replaced),
                  InternalError);
}

TEST_CASE(
    "tiers: single copies are given up, another policy takes over what is kept, and a block can "
    "pass ahead") {
  const TemporaryFolder folder("tiers_single");
  HomeTiers homes(layout(), home_options(folder.path(), 6, 0, 0));
  fill_homes(homes);
  DeviceCache cache(
      homes, {.range = {0, 1}, .slots = 4, .transit = 2, .poison = true}, make_lru_policy());
  Stream user(kCpu, "user");
  std::atomic<int> wrong{0};
  const auto use = [&](Block b) {
    const std::byte* at = cache.data(cache.acquire(b, Access::read, user), 0);
    user.enqueue([=, &wrong] {
      if (!moesaic::test::holds(at, b, 0, 0)) ++wrong;
    });
    cache.release(b, Access::read, user);
  };
  use(0);
  use(1);
  CHECK((cache.keeps(0) && cache.keeps(1) && !cache.keeps(2)));
  // 0 and 1 stay from now on; the others pass.
  cache.set_policy(make_static_policy({2, 2, 1, 1, 1, 1}));
  for (const Block b : {2, 3, 4})
    use(b);
  CHECK((cache.keeps(0) && cache.keeps(1)));
  CHECK((!cache.holds(2) && cache.holds(3) && cache.holds(4)));
  CHECK(!cache.prefetch(5));
  CHECK(!cache.holds(5));
  CHECK(cache.prefetch(5, true));  // in the place of 3
  CHECK((!cache.holds(3) && cache.holds(4) && cache.holds(5)));
  CHECK(cache.counters().prefetches == 1);
  use(5);
  CHECK(cache.counters().hits == 1);
  // A copy that nobody needs any more leaves without a way home.
  std::byte* at = cache.data(cache.acquire(1, Access::write, user), 0);
  user.enqueue([at] { put(at, 1, 0, 9); });
  CHECK_THROWS_AS(cache.discard(1), InternalError);
  cache.release(1, Access::write, user, SectionRange{0, 1});
  cache.discard(1);
  cache.discard(1);  // what is not there may be given up
  CHECK((!cache.holds(1) && cache.resident() == 3));
  CHECK(cache.counters().bytes_down == 0);
  use(1);
  CHECK(cache.keeps(1));
  user.synchronize();
  CHECK(wrong == 0);
}

}  // namespace
}  // namespace moesaic::test
