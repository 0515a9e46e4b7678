// Gradients that go round in a few slots: each has its own values until its update has read them.
#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "kernels/backend.h"
#include "kernels/ops/elementwise.h"
#include "tests/nn/expert_tiers_steps.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

namespace moesaic::test {
namespace {

ExpertTierOptions ring_options(std::int64_t slots, const TemporaryFolder& folder) {
  ExpertTierOptions o = options_of({}, folder.path());
  o.gradients_in_ring = true;
  for (TierGroupOptions& g : o.groups) {
    g.gradient_slots = slots;
    g.gradients_on_device = 0;
  }
  return o;
}

void linger(Stream& stream, double share) {
  const auto time = std::chrono::microseconds(static_cast<int>(share * 300));
  stream.enqueue([time] { std::this_thread::sleep_for(time); });
}

// Backwards of a layer in several micro-batches, and its updates on other streams, all as late as they like.
void check_ring(std::int64_t slots, std::uint64_t key) {
  const TemporaryFolder folder("gradient_ring");
  Experts experts(kF32);
  experts.store.offload_experts(ring_options(slots, folder));
  experts.store.seal(kCpu);
  experts.store.initialize(1);
  ExpertTiers& tiers = *experts.store.tiers();
  BackendOwner main({.scratch_bytes = 1 << 16}), one({.scratch_bytes = 1 << 16}),
      two({.scratch_bytes = 1 << 16});
  Draws draws{key};
  std::deque<Buffer> read;
  std::vector<std::pair<TensorView, float>> expected;
  for (int step = 0; step < 4; ++step) {
    tiers.begin_step();
    for (std::int64_t l = kLayers; l-- > 0;) {
      std::vector<float> sums(2 * kMembers, 0);
      for (std::int32_t mb = 0; mb < 3; ++mb) {
        std::vector<std::int64_t> rows;
        for (std::int64_t m = 0; m < kMembers; ++m)
          rows.push_back(draws.next() < 0.4 ? 0 : 1);
        if (std::count(rows.begin(), rows.end(), 0) == kMembers) rows[0] = 1;
        for (std::size_t k = 0; k < 2; ++k) {
          const auto add = static_cast<float>(1 + draws.below(1000));
          for (std::int64_t m = 0; m < kMembers; ++m)
            if (rows[static_cast<std::size_t>(m)] > 0)
              sums[k * kMembers + static_cast<std::size_t>(m)] += add;
          if (draws.next() < 0.3) linger(main.stream(), draws.next());
          tiers.gradients(experts.storages[static_cast<std::size_t>(l)][k],
                          {.kind = VisitKind::backward, .micro_batch = mb, .rows = rows},
                          main.stream(),
                          [&](const MemberRun& run) {
                            main.stream().enqueue([run, add, rows] {
                              for (std::int64_t m = run.begin; m < run.end; ++m) {
                                if (rows[static_cast<std::size_t>(m)] == 0) continue;
                                const std::int32_t slot =
                                    run.slot_of_member.as<std::int32_t>()[m - run.begin];
                                const std::int64_t each = run.slots.dim(1) * run.slots.dim(2);
                                for (std::int64_t i = 0; i < each; ++i)
                                  run.slots.as<float>()[slot * each + i] += add;
                              }
                            });
                          });
        }
      }
      for (std::size_t k = 0; k < 2; ++k) {
        const StorageId id = experts.storages[static_cast<std::size_t>(l)][k];
        for (std::int64_t m = 0; m < kMembers; ++m) {
          const float sum = sums[k * kMembers + static_cast<std::size_t>(m)];
          CHECK(tiers.has_gradient(id, m) == (sum > 0));
          BackendOwner& owner = m % 2 == 0 ? one : two;
          tiers.with_members(
              id,
              {&m, 1},
              {.gradient = MemberAccess::read, .last_use_of_gradient = true, .beside = true},
              owner.stream(),
              [&](std::span<const MemberTensors> t) {
                const TensorView from = t[0].gradient;
                read.emplace_back(from.bytes(), kCpu, "test");
                const TensorView to = read.back().view(from.shape(), from.dtype());
                if (draws.next() < 0.5) linger(owner.stream(), draws.next());
                copy_tensor(to, from, owner.stream());
                expected.emplace_back(to, sum);
              });
        }
      }
    }
  }
  for (BackendOwner* owner : {&main, &one, &two})
    owner->stream().synchronize();
  std::size_t wrong = 0;
  for (const auto& [values, sum] : expected)
    for (std::int64_t i = 0; i < values.numel(); ++i)
      wrong += values.as<float>()[i] == sum ? 0 : 1;
  CHECK(expected.size() == 4 * kLayers * 2 * kMembers);
  CHECK(wrong == 0);
  for (const TierCounters& c : tiers.counters()) {
    if (c.kind != "gradients") continue;
    CHECK(c.cache.uses > 0);
    CHECK(c.cache.bytes_up + c.cache.bytes_down == 0);
  }
}

}  // namespace

TEST_CASE("gradients in a ring: every update reads its own member's, however late it comes") {
  for (const std::int64_t slots :
       {kMembers, kMembers + 1, kMembers + 4, 2 * kMembers, 3 * kMembers})
    for (std::uint64_t key = 0; key < 4; ++key) {
      CAPTURE(slots, key);
      check_ring(slots, key);
    }
}

TEST_CASE(
    "gradients in a ring: no home, a slot's worth of memory each, and an update too late is "
    "found") {
  const TemporaryFolder folder("gradient_ring");
  Experts experts(kF32);
  experts.store.offload_experts(ring_options(kMembers + 2, folder));
  experts.store.seal(kCpu);
  experts.store.initialize(1);
  ExpertTiers& tiers = *experts.store.tiers();
  CHECK(tiers.gradients_in_ring());
  for (const MemoryUse& use : tiers.host_use())
    if (use.tag.find("gradients") != std::string::npos) CHECK(use.bytes == 0);
  for (const MemoryUse& use : tiers.device_use())
    if (use.tag == "experts' down gradients")
      CHECK(use.bytes >= (kMembers + 2) * kInner * kWidth * sizeof(float));
  BackendOwner owner({.scratch_bytes = 1 << 16});
  tiers.begin_step();
  const auto backward = [&](std::size_t layer) {
    tiers.gradients(experts.storages[layer][0],
                    {.kind = VisitKind::backward},
                    owner.stream(),
                    [](const MemberRun&) {});
  };
  backward(2);
  std::string found;
  try {
    backward(1);
  } catch (const InternalError& e) {
    found = e.what();
  }
  CHECK(found.find("still has another layer's gradient") != std::string::npos);
  owner.stream().synchronize();
  // Nor may a store be made with fewer slots than a layer has members.
  Experts few(kF32);
  few.store.offload_experts(ring_options(kMembers - 1, folder));
  CHECK_THROWS_AS(few.store.seal(kCpu), InternalError);
}

}  // namespace moesaic::test
