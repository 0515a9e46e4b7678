// Offloaded experts on a GPU, where copies are under way while kernels run: the bits of resident ones.
#include "tests/nn/expert_tiers_steps.h"
#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

TEST_CASE("expert tiers on a GPU: the bits of resident experts, from host memory and the file") {
  MOESAIC_NEEDS_CUDA();
  for (const Precision& precision : {kBf16, kSplit}) {
    const std::vector<std::byte> wanted = resident({.precision = precision}, kCuda).log;
    for (const std::int64_t slots : {3, 9, 18}) {
      for (const TierPolicy policy : {TierPolicy::sched, TierPolicy::random}) {
        INFO("slots " << slots << ", policy " << static_cast<int>(policy));
        const Run run{.precision = precision,
                      .policy = policy,
                      .slots = slots,
                      .in_file = slots == 9 ? 11 : 0};
        CHECK(offloaded(run, kCuda).log == wanted);
      }
    }
    CHECK(offloaded({.precision = precision, .weights = false, .slots = 4}, kCuda).log == wanted);
  }
}

}  // namespace
}  // namespace moesaic::test
