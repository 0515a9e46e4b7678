// Tensors that leave for host memory and come back: the plan of places, and the copies beside the work, with slow copies and
// poisoned places.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "core/base/random.h"
#include "memory/buffer.h"
#include "memory/offload/offloader.h"
#include "tests/support/catch.h"

namespace moesaic::offload {
namespace {

constexpr std::size_t kBytes = 256;

/// The micro-batches of a vertical order: `layers` tensors for each of `batches`; a layer writes its own and reads the one before.
std::vector<Visit> vertical(int layers, int batches) {
  std::vector<Visit> visits;
  const auto number = [&](int l, int m) { return l * batches + m; };
  for (int l = 0; l < layers; ++l) {
    for (int m = 0; m < batches; ++m) {
      visits.emplace_back();
      if (l > 0) visits.back().push_back({number(l - 1, m), false});
      visits.back().push_back({number(l, m), true});
    }
  }
  for (int l = layers; l-- > 0;) {
    for (int m = 0; m < batches; ++m) {
      visits.emplace_back();
      if (l > 0) visits.back().push_back({number(l - 1, m), false});
    }
  }
  return visits;
}

Plan plan_of(const std::vector<Visit>& visits, int tensors, const Options& options = {}) {
  return make_plan(
      std::vector<std::size_t>(static_cast<std::size_t>(tensors), kBytes), visits, options);
}

bool is_in(const std::vector<int>& list, int value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

/// Walks the plan on paper: which tensor a place holds; every tensor that a visit uses must be there.
void check_places(const Plan& plan, const std::vector<Visit>& visits) {
  std::vector<int> holds(plan.places.size(), -1);
  std::vector<bool> is_home(plan.tensors.size(), false), is_on_way(plan.tensors.size(), false);
  const auto place = [&](int t) -> int& {
    return holds[static_cast<std::size_t>(plan.tensors[static_cast<std::size_t>(t)].place)];
  };
  for (std::size_t v = 0; v < visits.size(); ++v) {
    const Plan::Step& step = plan.visits[v];
    for (const int t : step.loads) {
      REQUIRE(is_home[static_cast<std::size_t>(t)]);
      REQUIRE(place(t) == -1);
      place(t) = t;
      is_on_way[static_cast<std::size_t>(t)] = true;
    }
    for (const int t : step.awaits)
      is_on_way[static_cast<std::size_t>(t)] = false;
    for (const Use& use : visits[v]) {
      if (use.writes) {
        REQUIRE(place(use.tensor) == -1);
        REQUIRE(is_in(step.writes, use.tensor));
        place(use.tensor) = use.tensor;
      }
      REQUIRE(place(use.tensor) == use.tensor);
      REQUIRE_FALSE(is_on_way[static_cast<std::size_t>(use.tensor)]);
    }
    for (const int t : step.stores) {
      REQUIRE(place(t) == t);
      is_home[static_cast<std::size_t>(t)] = true;
    }
    for (const int t : step.leaves) {
      REQUIRE(place(t) == t);
      place(t) = -1;
    }
  }
  for (const int t : holds)
    CHECK(t == -1);
  std::size_t device = 0, host = 0;
  for (const std::size_t bytes : plan.places)
    device += bytes;
  for (const Plan::Tensor& t : plan.tensors) {
    REQUIRE(plan.places[static_cast<std::size_t>(t.place)] >= t.bytes);
    if (t.home >= 0) host += t.bytes;
  }
  CHECK(device == plan.device_bytes);
  CHECK(host == plan.host_bytes);
}

/// Lives at random: each is written once and read a few times.
std::vector<Visit> random_visits(std::uint64_t seed, int tensors, int visits) {
  std::vector<Visit> all(static_cast<std::size_t>(visits));
  std::uint64_t n = 0;
  const auto draw = [&](int below) { return static_cast<int>(uniform(seed, n++) * below); };
  for (int t = 0; t < tensors; ++t) {
    bool is_alive = false;
    const int pace = 1 + draw(20);
    for (int v = draw(visits / 2); v < visits; v += 1 + draw(pace)) {
      const bool writes = !is_alive || draw(5) == 0;
      all[static_cast<std::size_t>(v)].push_back({t, writes});
      is_alive = true;
    }
  }
  return all;
}

/// Does what the visits say for some rounds, and counts reads that did not find what was written last.
int wrong_reads(const std::vector<Visit>& visits,
                const std::vector<std::size_t>& sizes,
                Stream::Mode mode,
                const Disturbance& disturbance,
                bool slow_user = false) {
  Plan plan = make_plan(sizes, visits);
  const Buffer device(plan.device_bytes, kCpu, "device"),
      host(std::max<std::size_t>(plan.host_bytes, 1), kCpu, "host");
  const auto all = [](const Buffer& b) {
    return b.view({static_cast<std::int64_t>(b.bytes())}, DType::u8);
  };
  Offloader offloader(std::move(plan), {all(device), all(host)}, mode, disturbance);
  Stream user(kCpu, "user", mode);
  std::vector<std::uint8_t> expected(sizes.size(), 0);
  std::atomic<int> wrong = 0;
  std::uint8_t value = 1;
  for (int round = 0; round < 3; ++round) {
    for (const Visit& visit : visits) {
      offloader.begin_visit(user);
      if (slow_user) disturbance.before(user);
      for (const Use& use : visit) {
        const auto t = static_cast<std::size_t>(use.tensor);
        const TensorView at =
            offloader.place_of(use.tensor).rows(0, static_cast<std::int64_t>(sizes[t]));
        if (use.writes) expected[t] = value = static_cast<std::uint8_t>(value % 200 + 1);
        user.enqueue([at, byte = expected[t], writes = use.writes, &wrong] {
          if (writes) {
            std::memset(at.data(), byte, at.bytes());
          } else {
            const auto* bytes = at.as<std::uint8_t>();
            if (!std::all_of(bytes, bytes + at.bytes(), [&](auto b) { return b == byte; })) ++wrong;
          }
        });
      }
      offloader.end_visit(user);
    }
  }
  user.synchronize();
  offloader.synchronize();
  return wrong;
}

}  // namespace

TEST_CASE("offload plan: a few places for the tensors of all micro-batches") {
  constexpr int kLayers = 6, kBatches = 16;
  const auto visits = vertical(kLayers, kBatches);
  const Plan plan = plan_of(visits, kLayers * kBatches);
  check_places(plan, visits);
  // One layer's tensors come while the next one's go: each takes lead + 1 visits.
  CHECK(plan.places.size() <= 8);
  // All but what the last layer writes, which nobody reads, are written out once and come back for the next layer and for backward.
  CHECK(plan.bytes_out == (kLayers - 1) * kBatches * kBytes);
  CHECK(plan.host_bytes == plan.bytes_out);
  CHECK(plan.bytes_in == 2 * plan.bytes_out);
}

TEST_CASE("offload plan: what is needed again soon stays") {
  const auto visits = vertical(3, 2);
  const Plan plan = plan_of(visits, 6, {.lead = 2, .stay = 100});
  check_places(plan, visits);
  CHECK(plan.host_bytes == 0);
  CHECK(plan.places.size() == 5);  // the two of the last layer, which nobody reads, share one
}

TEST_CASE("offload plan: lives at random find their places") {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const auto visits = random_visits(seed, 12, 120);
    std::vector<std::size_t> sizes;
    for (int t = 0; t < 12; ++t)
      sizes.push_back(
          1 + static_cast<std::size_t>(uniform(seed + 1000, static_cast<std::uint64_t>(t)) * 3000));
    for (const Options& options : {Options{}, Options{1, 2}, Options{4, 9}})
      check_places(make_plan(sizes, visits, options), visits);
  }
}

TEST_CASE("offload plan: a tensor that is read unwritten, or used twice in a visit, is refused") {
  CHECK_THROWS_AS(make_plan(std::vector<std::size_t>{8}, {{{0, false}}}), InternalError);
  CHECK_THROWS_AS(make_plan(std::vector<std::size_t>{8}, {{{0, true}, {0, false}}}), InternalError);
}

TEST_CASE("offload: every read finds what was written, however slow the copies are") {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    const auto visits = random_visits(seed, 12, 80);
    const std::vector<std::size_t> sizes(12, 700);
    auto draws = std::make_shared<std::uint64_t>(0);
    const auto delay = [draws, seed](Stream& stream) {
      if (uniform(seed, (*draws)++) > 0.3) return;
      const auto time =
          std::chrono::microseconds(static_cast<int>(uniform(seed + 77, *draws) * 1500));
      stream.enqueue([time] { std::this_thread::sleep_for(time); });
    };
    CHECK(wrong_reads(visits, sizes, Stream::Mode::worker, {.poison = true, .before = delay}) == 0);
    CHECK(wrong_reads(visits, sizes, Stream::Mode::worker, {.before = delay}, true) == 0);
    CHECK(wrong_reads(visits, sizes, Stream::Mode::immediate, {.poison = true}) == 0);
  }
}

}  // namespace moesaic::offload
