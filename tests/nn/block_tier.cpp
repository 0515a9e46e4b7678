// Where the blocks of a tier live.
#include "core/nn/block_tier.h"

#include <algorithm>

#include <fmt/format.h>

#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

namespace moesaic::test {
namespace {

TEST_CASE("block tier: blocks in the file lie evenly between those in host memory") {
  constexpr std::int64_t kBlocks = 60;
  for (const std::int64_t on_device : {0, 1, 20, 41}) {
    for (const std::int64_t in_file : {0, 1, 7, 19}) {
      INFO(on_device << " on the device, " << in_file << " in the file");
      const TemporaryFolder folder("block_tier");
      ExpertTierOptions all;
      all.folder = folder.path();
      all.io = tiers::IoKind::threads;
      const BlockTier tier({.group = "down",
                            .kind = "states",
                            .sections = {{"m", 64}},
                            .blocks = kBlocks,
                            .in_file = in_file,
                            .on_device = on_device,
                            .staging_slots = in_file > 0 ? 2 : 0,
                            .slots = on_device + 3},
                           all,
                           kCpu,
                           false);
      std::vector<bool> has_home_in_file;  // of the blocks that pass through the cache, in order
      for (tiers::Block b = 0; b < kBlocks; ++b)
        if (!tier.homes().lives_on_device(b))
          has_home_in_file.push_back(tier.homes().lives_in_file(b));
      const auto passing = static_cast<std::int64_t>(has_home_in_file.size());
      CHECK(passing == kBlocks - on_device);
      // After each of them, as many were met as is their share, but for one.
      std::int64_t met = 0;
      for (std::int64_t i = 0; i < passing; ++i) {
        met += has_home_in_file[static_cast<std::size_t>(i)] ? 1 : 0;
        INFO("after " << i + 1 << " of " << passing << ": " << met);
        CHECK(met * passing <= (i + 1) * in_file);
        CHECK(met * passing > (i + 1) * in_file - passing);
      }
      CHECK(met == in_file);
    }
  }
}

}  // namespace
}  // namespace moesaic::test
