#include "comm/watchdog.h"

#include <atomic>
#include <filesystem>
#include <thread>

#include <unistd.h>

#include "comm/hang_verdict.h"
#include "comm/rank_status.h"
#include "comm/status_board.h"
#include "core/base/activity.h"
#include "tests/support/catch.h"

namespace moesaic::test {
namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

RankStatus status(int rank, const std::string& place) {
  RankStatus s;
  s.rank = rank;
  s.life = "one";
  s.host = "node" + std::to_string(rank / 2);
  s.pid = 1000 + rank;
  s.beat = 7;
  s.limit_s = 0.5;
  s.period = "training";
  s.place = place;
  return s;
}
RankStatus waiting(int rank, const std::string& operation, std::uint64_t number) {
  RankStatus s = status(rank, "step 12");
  s.exchange = {.operation = operation,
                .group = "world",
                .place = "step 12, backward, layer 3",
                .device = "cpu",
                .number = number,
                .number_in_group = number,
                .bytes = 1200000,
                .ranks = 3,
                .awaited = 1,
                .is_moving = true,
                .seconds = 5,
                .awaited_ranks = {1}};
  return s;
}

TEST_CASE("published values are read whole while they are written") {
  struct Block {
    std::array<std::uint64_t, 24> words{};
  };
  Published<Block> published;
  std::atomic<bool> done{false}, torn{false};
  std::atomic<std::uint64_t> seen{0};
  std::thread reader([&] {
    while (!done) {
      const Block b = published.read();
      for (const auto w : b.words)
        torn = torn || w != b.words[0];
      ++seen;
    }
  });
  for (std::uint64_t i = 1; i <= 200000 || seen < 100; ++i)
    published.update([i](Block& b) { b.words.fill(i); });
  done = true;
  reader.join();
  REQUIRE_FALSE(torn);
  REQUIRE(published.read().words[23] >= 200000);
}

TEST_CASE("a background thread counts apart") {
  const auto before = progress_count(false), all = progress_count(true);
  std::thread([] {
    count_as_background();
    count_progress();
  }).join();
  REQUIRE(progress_count(false) == before);
  REQUIRE(progress_count(true) == all + 1);
}

TEST_CASE("status: what was written is read, and half of it is refused") {
  RankStatus s = waiting(2, "all_reduce", 87);
  s.idle_s = 1.5;
  s.expired = true;
  s.exchange.awaited = 12;
  s.exchange.awaited_ranks = {0, 1, 3};
  const std::string text = s.text();
  const auto read = RankStatus::parse(text);
  REQUIRE(read);
  REQUIRE(read->text() == text);
  REQUIRE(describe(*read) == describe(s));
  for (std::size_t n = 0; n + 4 < text.size(); n += 7)
    REQUIRE_FALSE(RankStatus::parse(text.substr(0, n)));
  REQUIRE_FALSE(RankStatus::parse("garbage"));
}

TEST_CASE("status: what the threads noted") {
  Activity activity;
  activity.period.write({.name = "training", .step = 12, .is_long = false});
  activity.running.update([](Place& p) {
    p.push("backward", -1);
    p.push("layer", 3);
  });
  REQUIRE(describe(status_of(activity)) == "training, step 12, backward, layer 3; in no exchange");
  activity.exchange.update([](Exchange& e) {
    e.operation = "all_reduce";
    std::string("world").copy(e.group.data(), 5);
    e.number_in_group = 87;
    e.bytes = 1200000;
    e.ranks = 2;
    e.state = Exchange::State::moving;
    e.awaited = 1;
    e.awaited_ranks[0] = 1;
  });
  const std::string text = describe(status_of(activity));
  REQUIRE(contains(text, "all_reduce #87 of group world (2 ranks, 1.2 MB)"));
  REQUIRE(contains(text, "waits for rank 1"));
  activity.exchange.update([](Exchange& e) { e.state = Exchange::State::done; });
  REQUIRE(contains(describe(status_of(activity)), "in no exchange"));
}

TEST_CASE("verdict: who is behind") {
  const auto judge = [](const std::vector<SeenRank>& seen) { return judge_hang(seen, 2); };
  const SeenRank at87{waiting(0, "all_reduce", 87), 0.1}, also{waiting(2, "all_reduce", 87), 0.2};
  using Ranks = std::vector<int>;
  SECTION("a rank without a sign of life") {
    const auto v = judge({at87, {status(1, "step 12, forward, layer 0"), 5.0}, also});
    REQUIRE(v.culprits == Ranks{1});
    REQUIRE(contains(v.text, "rank 1 gives no sign of life"));
    REQUIRE(contains(v.text, "node0 (pid 1001): training, step 12, forward, layer 0"));
    REQUIRE(contains(v.text, "while ranks 0, 2 wait in all_reduce #87 of group world"));
    REQUIRE(contains(v.text, "issued in step 12, backward, layer 3"));
  }
  SECTION("a rank that never gave one") {
    const auto v = judge({at87, {std::nullopt, 0}, also});
    REQUIRE(v.culprits == Ranks{1});
  }
  SECTION("a rank that computes") {
    RankStatus queued = waiting(1, "all_reduce", 87);
    queued.exchange.is_moving = false;
    const auto v = judge({at87, {queued, 0.1}, also});
    REQUIRE(v.culprits == Ranks{1});
    REQUIRE(contains(v.text, "its own work comes before all_reduce #87"));
  }
  SECTION("a rank in an earlier exchange") {
    const auto v = judge({at87, {waiting(1, "broadcast", 86), 0.1}, also});
    REQUIRE(v.culprits == Ranks{1});
    REQUIRE(contains(v.text, "rank 1 is behind, in broadcast #86"));
  }
  SECTION("a rank in another exchange of the same number") {
    const auto v = judge({at87, {waiting(1, "barrier", 87), 0.1}, also});
    REQUIRE(v.culprits == Ranks{1});
    REQUIRE(contains(v.text, "do not fit together"));
  }
  SECTION("a network that carries nothing from one rank") {
    const auto v = judge({at87, {waiting(1, "all_reduce", 87), 0.1}, also});
    REQUIRE(v.culprits == Ranks{1});
    REQUIRE(contains(v.text, "most wait for rank 1"));
  }
}

TEST_CASE("watchdog: progress and other ranks' progress keep it quiet") {
  const auto folder =
      std::filesystem::temp_directory_path() / ("moesaic_watchdog_" + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  {
    Activity activity;
    activity.period.write({.name = "training", .step = 1, .is_long = false});
    Watchdog watchdog(activity, {.limit_s = 0.5, .long_limit_s = 1, .rank = 0, .closing = ""});
    // This process would end if the watchdog expired.
    for (int i = 0; i < 40; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      count_progress();
    }
    // Rank 1 gets on, rank 0 waits for it.
    const StatusBoard board(folder);
    RankStatus other = status(1, "step 1");
    REQUIRE(board.write(other));
    watchdog.use_board(folder, "one", 0, 2);
    for (int i = 0; i < 40; ++i) {
      ++other.beat;
      REQUIRE(board.write(other));
      std::this_thread::sleep_for(std::chrono::milliseconds(40));
    }
    const auto own = board.read(0);
    REQUIRE(own);
    REQUIRE(own->idle_s > 0.6);
    REQUIRE_FALSE(own->expired);
  }
  REQUIRE_FALSE(StatusBoard(folder).read(0));  // removed with the watchdog
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace moesaic::test
