// The tiers together: random work, and steps like those of training, against plain memory; with failing disks, late
// copies and the smallest budgets.
#include <atomic>
#include <numeric>

#include "memory/tiers/cache_simulation.h"
#include "memory/tiers/device_cache.h"
#include "tests/memory/tier_support.h"

namespace moesaic::test {
namespace {

using namespace tiers;

const RecordLayout& layout() {
  static const RecordLayout l({{"W", 5000}, {"R", 4096}, {"M", 700}, {"V", 9001}});
  return l;
}

// What a section holds after its n-th change; every byte depends on all three.
std::byte value(Block block, int section, std::uint64_t version, std::size_t i) {
  return static_cast<std::byte>(mix64(static_cast<std::uint64_t>(block) * 131 +
                                      static_cast<std::uint64_t>(section) * 31 + version * 1000003 +
                                      i / 64) >>
                                (i % 8 * 8));
}
void put(std::byte* at, Block block, int section, std::uint64_t version) {
  for (std::size_t i = 0; i < layout().section(section).bytes; ++i)
    at[i] = value(block, section, version, i);
}
bool holds(const std::byte* at, Block block, int section, std::uint64_t version) {
  for (std::size_t i = 0; i < layout().section(section).bytes; ++i)
    if (at[i] != value(block, section, version, i)) return false;
  return true;
}

struct Versions {
  explicit Versions(Block blocks) : of(static_cast<std::size_t>(blocks)) {}
  std::uint64_t& at(Block b, int s) {
    return of[static_cast<std::size_t>(b)][static_cast<std::size_t>(s)];
  }
  std::vector<std::array<std::uint64_t, kMaxSections>> of;
};

// The same call until it goes through: injected errors pass.
template <class F>
auto persist(F&& f, int* failures = nullptr) {
  for (int i = 0;; ++i) {
    try {
      return f();
    } catch (const ResourceError& e) {
      REQUIRE(contains(e.what(), "Input/output error"));
      REQUIRE(i < 100);
      if (failures != nullptr) ++*failures;
    }
  }
}

void fill_homes(HomeTiers& homes) {
  for (Block b = 0; b < homes.blocks(); ++b) {
    const auto lease =
        persist([&] { return homes.lease(b, layout().all(), HomeTiers::Contents::replaced); });
    for (int s = 0; s < layout().count(); ++s)
      put(lease.image + layout().section(s).offset, b, s, 0);
    homes.release(b, layout().all(), layout().all());
  }
}

void check_homes(HomeTiers& homes, Versions& versions) {
  persist([&] { homes.flush(); });
  for (Block b = 0; b < homes.blocks(); ++b) {
    const auto lease =
        persist([&] { return homes.lease(b, layout().all(), HomeTiers::Contents::needed); });
    for (int s = 0; s < layout().count(); ++s) {
      INFO("block " << b << " section " << s);
      REQUIRE(holds(lease.image + layout().section(s).offset, b, s, versions.at(b, s)));
    }
    homes.release(b, layout().all(), std::nullopt);
  }
}

HomeTiers::Options home_options(const std::filesystem::path& folder,
                                Block blocks,
                                int in_file_of_4,
                                std::int64_t staging) {
  HomeTiers::Options o;
  for (Block b = 0; b < blocks; ++b)
    o.in_file.push_back(b % 4 < in_file_of_4 ? 1 : 0);
  o.staging_slots = staging;
  o.poison = true;
  o.file.file.folder = folder;
  o.file.file.direct = false;  // that is for tests/memory/file_tier.cpp; here it takes time
  o.file.piece_bytes = 8192;
  return o;
}

Faults bad_disk(std::uint64_t seed, double broken) {
  Faults f{.seed = seed, .cut = 0.1, .short_count = 0.1, .late = 0.2, .delay = 0.05};
  f.error = [broken](const IoRequest&, double chance) {
    return chance < broken ? EIO : chance < broken + 0.02 ? EINTR : 0;
  };
  return f;
}

TEST_CASE("homes: leases, staging and the file keep every value") {
  for (const IoKind kind : queue_kinds()) {
    for (const int in_file_of_4 : {0, 2, 4}) {
      const TemporaryFolder folder("homes");
      HomeTiers homes(layout(),
                      home_options(folder.path(), 9, in_file_of_4, 2),
                      faulty_queue(kind, 3, bad_disk(3, 0.01)));
      CHECK((homes.file() != nullptr) == (in_file_of_4 > 0));
      Versions versions(9);
      CHECK_THROWS_AS(homes.lease(1, {0, 1}, HomeTiers::Contents::needed), InternalError);
      fill_homes(homes);
      check_homes(homes, versions);
      // Sections of a block are leased on their own.
      auto w = persist([&] { return homes.lease(5, {0, 1}, HomeTiers::Contents::needed); });
      auto states = persist([&] { return homes.lease(5, {1, 3}, HomeTiers::Contents::needed); });
      CHECK(w.image == states.image);
      CHECK_THROWS_AS(homes.lease(5, {2, 1}, HomeTiers::Contents::needed), InternalError);
      CHECK_THROWS_AS(homes.flush(), InternalError);
      put(w.image + layout().section(2).offset, 5, 2, 7);
      versions.at(5, 2) = 7;
      CHECK_THROWS_AS(homes.release(5, {1, 3}, SectionRange{0, 2}), InternalError);
      homes.release(5, {1, 3}, SectionRange{2, 1});
      homes.release(5, {0, 1}, std::nullopt);
      CHECK_THROWS_AS(homes.release(5, {0, 1}, std::nullopt), InternalError);
      check_homes(homes, versions);
      if (in_file_of_4 == 4) {
        // Two staging slots: with both leased, a third is one too many.
        persist([&] { return homes.lease(0, {0, 1}, HomeTiers::Contents::needed); });
        persist([&] { return homes.lease(1, {0, 1}, HomeTiers::Contents::needed); });
        CHECK(!homes.prefetch(2, {0, 1}));
        CHECK_THROWS_AS(homes.lease(2, {0, 1}, HomeTiers::Contents::needed), InternalError);
        // One that is released with work under way is waited for.
        Stream slow(kCpu, "slow");
        std::atomic<bool> done{false};
        slow.enqueue([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
          done = true;
        });
        Event after(kCpu);
        slow.record(after);
        homes.release(0, {0, 1}, std::nullopt, after);
        persist([&] { return homes.lease(2, {0, 1}, HomeTiers::Contents::needed); });
        CHECK(done);
        CHECK(homes.lease_waits() == 1);
        homes.release(1, {0, 1}, std::nullopt);
        homes.release(2, {0, 1}, std::nullopt);
        while (!persist([&] {
          homes.prefetch(3, layout().all());
          return homes.is_ready(3, layout().all());
        })) {
          std::this_thread::yield();
        }
      }
    }
  }
}

TEST_CASE(
    "homes: what several leases changed while their work was under way all reaches the file") {
  const TemporaryFolder folder("homes_leases");
  HomeTiers homes(layout(), home_options(folder.path(), 4, 4, 2));
  fill_homes(homes);
  Versions versions(4);
  Stream slow(kCpu, "slow");
  std::atomic<bool> go{false};
  slow.enqueue([&] {
    while (!go)
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  });
  const SectionRange states{1, 3};
  for (const int s : {1, 3, 2}) {
    const auto lease = homes.lease(0, states, HomeTiers::Contents::needed);
    CHECK(lease.pending.size() == (s == 1 ? 0u : s == 3 ? 1u : 2u));
    std::byte* at = lease.image + layout().section(s).offset;
    versions.at(0, s) = 4;
    slow.enqueue([at, s] { put(at, 0, s, 4); });
    Event done(kCpu);
    slow.record(done);
    homes.release(0, states, SectionRange{s, 1}, done);
  }
  go = true;
  homes.flush();
  for (const Block b : {1, 2, 3}) {  // pushes the record out of staging
    homes.lease(b, layout().all(), HomeTiers::Contents::needed);
    homes.release(b, layout().all(), std::nullopt);
  }
  check_homes(homes, versions);
}

TEST_CASE("homes: the host budget is a ceiling for homes and staging together") {
  const TemporaryFolder folder("homes_budget");
  HomeTiers::Options o = home_options(folder.path(), 8, 2, 3);
  const std::uint64_t bytes = HomeTiers(layout(), o).host_bytes();
  CHECK(bytes == 7 * layout().stride() + 2 * kBlockAlignment);
  o.host_budget = bytes - 1;
  const std::string text = message_of<ResourceError>([&] { HomeTiers homes(layout(), o); });
  CHECK(contains(text, "4 experts in host memory and 3 slots"));
  CHECK(contains(
      text, std::to_string(bytes) + " bytes; memory.host_budget is " + std::to_string(bytes - 1)));
  o.staging_slots = 1;
  CHECK_THROWS_AS(HomeTiers(layout(), o), InternalError);
}

std::unique_ptr<CachePolicy> policy_of(int which, std::uint64_t seed) {
  return which == 0   ? make_random_policy(seed)
         : which == 1 ? make_lru_policy()
                      : make_static_policy(even_weights(8, 8));
}

int fuzz_failures = 0;

// Random uses, prefetches, write-backs and evictions by two caches over the same homes, on three streams.
void fuzz(std::uint64_t seed, IoKind kind) {
  INFO("seed " << seed);
  const std::uint64_t key = mix64(seed + 17);
  std::uint64_t draws = 0;
  const auto chance = [&] { return uniform(key, draws++); };
  const auto below = [&](std::int64_t n) {
    return static_cast<std::int64_t>(chance() * static_cast<double>(n));
  };
  constexpr Block kBlocks = 16;
  const TemporaryFolder folder("tiers_fuzz");
  HomeTiers homes(
      layout(),
      home_options(folder.path(), kBlocks, static_cast<int>(seed % 5), 2 + below(4)),
      faulty_queue(kind, 1 + static_cast<int>(below(4)), bad_disk(seed, seed % 3 == 0 ? 0.02 : 0)));
  fill_homes(homes);
  Versions versions(kBlocks);
  std::vector<Stream> users;
  for (int i = 0; i < 3; ++i)
    users.emplace_back(kCpu, "user");
  std::atomic<int> wrong{0};
  int failures = 0;
  {
    std::vector<std::unique_ptr<DeviceCache>> caches;
    for (const SectionRange range : {SectionRange{0, 1}, SectionRange{1, 3}}) {
      const std::int64_t slots = 3 + below(8);
      caches.push_back(std::make_unique<DeviceCache>(
          homes,
          DeviceCache::Options{
              .range = range, .slots = slots, .transit = 1 + below(slots), .poison = true},
          policy_of(static_cast<int>(seed % 3), seed)));
    }
    const auto delay = [&](Stream& stream) {
      if (chance() > 0.1) return;
      const auto time = std::chrono::microseconds(below(300));
      stream.enqueue([time] { std::this_thread::sleep_for(time); });
    };
    for (int step = 0; step < 150; ++step) {
      const bool states = chance() < 0.5;
      DeviceCache& cache = *caches[states ? 1 : 0];
      const SectionRange range = states ? SectionRange{1, 3} : SectionRange{0, 1};
      delay(cache.load_stream());
      delay(cache.write_stream());
      Stream& user = users[static_cast<std::size_t>(below(3))];
      const Block b = below(kBlocks);
      const double what = chance();
      if (what < 0.15) {
        persist([&] { return cache.prefetch(b); }, &failures);
      } else if (what < 0.25) {
        persist([&] { cache.write_back(b); }, &failures);
      } else if (what < 0.27) {
        persist([&] { cache.flush(); }, &failures);
      } else {
        // Up to two blocks at once, as many as the smallest cache holds beside one to come.
        std::vector<Block> blocks{b};
        if (chance() < 0.5 && (b + 1) % kBlocks != b) blocks.push_back((b + 1) % kBlocks);
        const bool writes = chance() < 0.5;
        const bool replaces = writes && chance() < 0.3;
        std::vector<std::byte*> at;
        for (const Block u : blocks)
          at.push_back(persist(
              [&] {
                return cache.acquire(
                    u,
                    writes ? Access::write : Access::read,
                    user,
                    replaces ? DeviceCache::Contents::replaced : DeviceCache::Contents::loaded);
              },
              &failures));
        delay(user);
        for (std::size_t i = 0; i < blocks.size(); ++i) {
          const Block u = blocks[i];
          const SectionRange changed =
              replaces ? range
                       : SectionRange{range.first + static_cast<int>(below(range.count)), 1};
          for (int s = range.first; s < range.end(); ++s) {
            const std::uint64_t was = versions.at(u, s);
            const bool changes = writes && s >= changed.first && s < changed.end();
            if (changes) versions.at(u, s) = was + 1;
            std::byte* section = at[i] + cache.offset_of(s);
            user.enqueue([section, u, s, was, changes, replaces, &wrong] {
              if (!replaces && !moesaic::test::holds(section, u, s, was)) ++wrong;
              if (changes) put(section, u, s, was + 1);
            });
          }
          cache.release(u,
                        writes ? Access::write : Access::read,
                        user,
                        writes ? std::optional(changed) : std::nullopt);
        }
      }
      const auto& c = cache.counters();
      REQUIRE(c.loads - c.drops == static_cast<std::uint64_t>(cache.resident()));
    }
    for (const auto& cache : caches)
      persist([&] { cache->flush(); });
    for (Stream& u : users)
      u.synchronize();
    CHECK(wrong == 0);
    check_homes(homes, versions);
  }
  fuzz_failures += failures;
}

TEST_CASE(
    "tiers: random reads, writes and evictions with failing disks and late copies keep every "
    "value") {
  for (const IoKind kind : queue_kinds())
    for (std::uint64_t seed = 0; seed < 20; ++seed)
      fuzz(seed, kind);
  CHECK(fuzz_failures > 10);  // errors were met, by all calls together
}

struct TrainingRun {
  int policy = 0;  // 0 to 2: policy_of(); 3: sched
  std::int64_t slots = 3;
  int in_file_of_4 = 0;
  Stream::Mode mode = Stream::Mode::worker;
  bool delays = false, prefetches = false;
};
struct TrainingResult {
  int wrong = 0;
  std::vector<std::uint64_t> moves;  // of both caches after every visit
  std::uint64_t hits = 0, uses = 0;
};

// Steps like those of training: forward and backward read weights, an update reads and writes weights and states.
TrainingResult train(const TouchLog& log, const TrainingRun& run) {
  const TemporaryFolder folder("tiers_train");
  const Block blocks = log.blocks();
  HomeTiers homes(layout(), home_options(folder.path(), blocks, run.in_file_of_4, 3));
  fill_homes(homes);
  Versions versions(blocks);
  const auto policy = [&] {
    return run.policy < 3 ? policy_of(run.policy, 4)
                          : make_sched_policy(std::make_unique<ScheduleForecast>(
                                ScheduleForecast::Options{.step = log.schedule(),
                                                          .layers = log.layers,
                                                          .experts = log.experts,
                                                          .updates = log.updates}));
  };
  DeviceCache weights(
      homes,
      {.range = {0, 1}, .slots = run.slots, .transit = 1, .mode = run.mode, .poison = true},
      policy());
  DeviceCache states(homes,
                     {.range = {1, 3}, .slots = 3, .transit = 2, .mode = run.mode, .poison = true},
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
  for (const TouchLog::Entry& entry : log.entries) {
    weights.begin_visit(entry.visit, entry.blocks);
    const bool updates = entry.visit.kind == VisitKind::update;
    for (const Block b : entry.blocks) {
      const Access access = updates ? Access::write : Access::read;
      std::byte* w = weights.acquire(b, access, compute);
      delay(weights.load_stream());
      delay(compute);
      read(w, b, 0);
      if (updates) {
        std::byte* image = states.acquire(b, Access::write, compute);
        delay(states.write_stream());
        for (int s = 1; s < 4; ++s) {
          std::byte* at = image + states.offset_of(s);
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
  compute.synchronize();
  check_homes(homes, versions);
  result.wrong = wrong;
  result.hits = weights.counters().hits;
  result.uses = weights.counters().uses;
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
                 "all 3 slots of 'expert cache' (8192 bytes each) are in use at once"));
  CHECK(!cache.prefetch(3));
  for (Block b = 0; b < 3; ++b) {
    CHECK(cache.holds(b));  // nobody's copy was taken away
    cache.release(b, Access::read, user);
  }
  // Changed, and then overtaken by a checkpoint: the homes get other values, the copies are given up.
  std::byte* at = cache.acquire(1, Access::write, user);
  user.enqueue([at] { put(at, 1, 0, 5); });
  cache.release(1, Access::write, user, SectionRange{0, 1});
  cache.discard();
  CHECK(cache.resident() == 0);
  fill_homes(homes);
  at = cache.acquire(1, Access::read, user);
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

}  // namespace
}  // namespace moesaic::test
