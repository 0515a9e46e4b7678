#include "memory/tiers/home_tiers.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "tests/memory/block_support.h"

namespace moesaic::test {
namespace {

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

TEST_CASE("homes: which sections ever had values, in host memory and in the file") {
  const TemporaryFolder folder("homes");
  HomeTiers homes(layout(), home_options(folder.path(), 6, 2, 2));
  for (tiers::Block b = 0; b < 6; ++b) {
    CHECK_FALSE(homes.has_values(b, {0, 1}));
    homes.lease(b, {1, 1}, HomeTiers::Contents::replaced);
    homes.release(b, {1, 1}, SectionRange{1, 1});
  }
  // By then others have the staging slots of the first ones.
  for (tiers::Block b = 0; b < 6; ++b) {
    INFO(b);
    CHECK(homes.has_values(b, {1, 1}));
    CHECK_FALSE(homes.has_values(b, {0, 1}));
    CHECK_FALSE(homes.has_values(b, {1, 2}));
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

TEST_CASE("homes: what was read ahead waits for its lease, unless nobody waits for it any more") {
  const TemporaryFolder folder("homes_ahead");
  HomeTiers homes(layout(), home_options(folder.path(), 6, 4, 3));
  fill_homes(homes);
  homes.flush();
  const SectionRange w{0, 1};
  const auto arrived = [&](Block b) {
    while (!homes.is_ready(b, w))
      std::this_thread::yield();
  };
  const auto reads = [&] { return homes.file()->counters().reads; };
  const auto use = [&](Block b) {
    const auto lease = homes.lease(b, w, HomeTiers::Contents::needed);
    CHECK(holds(lease.image, b, 0, 0));
    homes.release(b, w, std::nullopt);
  };
  use(5);
  const std::uint64_t before = reads();
  for (const Block b : {0, 1, 2}) {
    REQUIRE(homes.prefetch(b, w));
    arrived(b);
  }
  CHECK(!homes.prefetch(3, w));
  CHECK(homes.prefetch(1, w));  // is there
  use(1);
  CHECK(homes.prefetch(3, w));  // in the place of 1
  use(0);
  use(2);
  use(3);
  CHECK(reads() == before + 4);
  for (const Block b : {0, 1, 2}) {
    REQUIRE(homes.prefetch(b, w));
    arrived(b);
  }
  use(4);  // who cannot wait takes a place
  homes.forget_prefetched();
  for (const Block b : {3, 5})
    CHECK(homes.prefetch(b, w));
  homes.flush();
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

}  // namespace
}  // namespace moesaic::test
