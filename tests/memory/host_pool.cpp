#include "memory/tiers/host_pool.h"

#include <algorithm>
#include <set>

#include "memory/tiers/record_layout.h"
#include "tests/memory/tier_support.h"

namespace moesaic::test {
namespace {

using namespace tiers;

TEST_CASE("host pool: slots in chunks, aligned, each taken once") {
  HostPool pool({.slot_bytes = 8192, .slots = 10, .chunk_bytes = 3 * 8192 + 100, .poison = true});
  CHECK(pool.regions().size() == 4);
  std::set<std::byte*> taken;
  for (int i = 0; i < 10; ++i) {
    std::byte* slot = pool.take();
    REQUIRE(slot != nullptr);
    CHECK(reinterpret_cast<std::uintptr_t>(slot) % kBlockAlignment == 0);
    for (std::byte* t : taken)
      CHECK((slot + 8192 <= t || t + 8192 <= slot));
    CHECK(std::any_of(pool.regions().begin(), pool.regions().end(), [&](const Memory& m) {
      return slot >= m.data() && slot + 8192 <= m.data() + m.size();
    }));
    taken.insert(slot);
  }
  CHECK(pool.take() == nullptr);
  std::byte* one = *taken.begin();
  one[8191] = std::byte{7};
  pool.give_back(one);
  CHECK(one[8191] == std::byte{0xff});
  CHECK_THROWS_AS(pool.give_back(one), InternalError);
  CHECK_THROWS_AS(pool.give_back(one + 4096), InternalError);
  CHECK(pool.take() == one);
  // Every byte is charged to the tag.
  const auto uses = memory_in_use();
  CHECK(std::any_of(uses.begin(), uses.end(), [](const MemoryUse& u) {
    return u.tag == "host tier" && u.bytes == 10 * 8192 + 4 * 4096;
  }));
}

TEST_CASE("host pool: the budget is a hard ceiling, and messages give the numbers") {
  HostPool::Options o{.slot_bytes = 4096, .slots = 100};
  o.budget_bytes = HostPool::bytes_for(o);
  const HostPool fits(o);
  --o.budget_bytes;
  const std::string text = message_of<ResourceError>([&] { HostPool pool(o); });
  CHECK(contains(text, "need " + std::to_string(o.budget_bytes + 1) + " bytes"));
  CHECK(contains(text, "memory.host_budget is " + std::to_string(o.budget_bytes)));
  // More than any machine has; sizes are of 64 bits.
  HostPool::Options large{.slot_bytes = std::uint64_t{1} << 47, .slots = 4096};
  const std::string none = message_of<ResourceError>([&] { HostPool pool(large); });
  CHECK(contains(none, "the system gave 0 of"));
  CHECK(contains(none, "ulimit -l"));
}

}  // namespace
}  // namespace moesaic::test
