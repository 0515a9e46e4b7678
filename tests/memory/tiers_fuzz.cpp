// Random work through all tiers against plain memory, with failing disks and late copies.
#include <atomic>
#include <chrono>
#include <thread>

#include "memory/tiers/device_cache.h"
#include "tests/memory/block_support.h"

namespace moesaic::test {
namespace {

int fuzz_failures = 0;

// Random uses, prefetches, write-backs, discards and evictions by two caches over the same homes, in two lanes, on three
// streams.
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
      const std::int64_t transit = 1 + below(slots);
      caches.push_back(std::make_unique<DeviceCache>(
          homes,
          DeviceCache::Options{.range = range,
                               .slots = slots,
                               .transit = transit,
                               .transit_beside = seed % 2 == 0 ? 0 : below(transit),
                               .poison = true},
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
      const auto lane = chance() < 0.5 ? DeviceCache::Lane::main : DeviceCache::Lane::beside;
      delay(cache.load_stream(lane));
      delay(cache.write_stream(lane));
      Stream& user = users[static_cast<std::size_t>(below(3))];
      const Block b = below(kBlocks);
      const double what = chance();
      if (what < 0.15) {
        persist([&] { return cache.prefetch(b); }, &failures);
      } else if (what < 0.25) {
        persist([&] { cache.write_back(b, lane); }, &failures);
      } else if (what < 0.27) {
        persist([&] { cache.flush(); }, &failures);
      } else {
        // Up to two blocks at once, as many as the smallest cache holds beside one to come.
        std::vector<Block> blocks{b};
        if (chance() < 0.5 && (b + 1) % kBlocks != b) blocks.push_back((b + 1) % kBlocks);
        const bool writes = chance() < 0.5;
        const bool replaces = writes && chance() < 0.3;
        std::vector<std::int64_t> at;
        for (const Block u : blocks)
          at.push_back(persist(
              [&] {
                return cache.acquire(
                    u,
                    writes ? Access::write : Access::read,
                    user,
                    replaces ? DeviceCache::Contents::replaced : DeviceCache::Contents::loaded,
                    lane);
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
            std::byte* section = cache.data(at[i], s);
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

}  // namespace
}  // namespace moesaic::test
