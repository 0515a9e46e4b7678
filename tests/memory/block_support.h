#pragma once
// Blocks whose bytes say what they are, in all tiers.
#include <array>
#include <cstdint>
#include <filesystem>
#include <vector>

#include "memory/tiers/home_tiers.h"
#include "memory/tiers/policy.h"
#include "tests/memory/tier_support.h"

namespace moesaic::test {

using namespace tiers;

inline const RecordLayout& layout() {
  static const RecordLayout l({{"W", 5000}, {"R", 4096}, {"M", 700}, {"V", 9001}});
  return l;
}

// What a section holds after its n-th change; every byte depends on all three.
inline std::byte value(Block block, int section, std::uint64_t version, std::size_t i) {
  return static_cast<std::byte>(mix64(static_cast<std::uint64_t>(block) * 131 +
                                      static_cast<std::uint64_t>(section) * 31 + version * 1000003 +
                                      i / 64) >>
                                (i % 8 * 8));
}
inline void put(std::byte* at, Block block, int section, std::uint64_t version) {
  for (std::size_t i = 0; i < layout().section(section).bytes; ++i)
    at[i] = value(block, section, version, i);
}
inline bool holds(const std::byte* at, Block block, int section, std::uint64_t version) {
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

inline void fill_homes(HomeTiers& homes) {
  for (Block b = 0; b < homes.blocks(); ++b) {
    if (homes.lives_on_device(b)) continue;
    const auto lease =
        persist([&] { return homes.lease(b, layout().all(), HomeTiers::Contents::replaced); });
    for (int s = 0; s < layout().count(); ++s)
      put(lease.image + layout().section(s).offset, b, s, 0);
    homes.release(b, layout().all(), layout().all());
  }
}

inline void check_homes(HomeTiers& homes, Versions& versions) {
  persist([&] { homes.flush(); });
  for (Block b = 0; b < homes.blocks(); ++b) {
    if (homes.lives_on_device(b)) continue;
    const auto lease =
        persist([&] { return homes.lease(b, layout().all(), HomeTiers::Contents::needed); });
    for (int s = 0; s < layout().count(); ++s) {
      INFO("block " << b << " section " << s);
      REQUIRE(holds(lease.image + layout().section(s).offset, b, s, versions.at(b, s)));
    }
    homes.release(b, layout().all(), std::nullopt);
  }
}

inline HomeTiers::Options home_options(const std::filesystem::path& folder,
                                       Block blocks,
                                       int in_file_of_4,
                                       std::int64_t staging,
                                       int on_device_of_4 = 0) {
  HomeTiers::Options o;
  for (Block b = 0; b < blocks; ++b) {
    o.in_file.push_back(b % 4 < in_file_of_4 ? 1 : 0);
    o.on_device.push_back(3 - b % 4 < on_device_of_4 ? 1 : 0);
  }
  o.staging_slots = staging;
  o.poison = true;
  o.file.file.folder = folder;
  o.file.file.direct = false;  // that is for tests/memory/file_tier.cpp; here it takes time
  o.file.piece_bytes = 8192;
  return o;
}

inline Faults bad_disk(std::uint64_t seed, double broken) {
  Faults f{.seed = seed, .cut = 0.1, .short_count = 0.1, .late = 0.2, .delay = 0.05};
  f.error = [broken](const IoRequest&, double chance) {
    return chance < broken ? EIO : chance < broken + 0.02 ? EINTR : 0;
  };
  return f;
}

inline std::unique_ptr<CachePolicy> policy_of(int which, std::uint64_t seed) {
  return which == 0   ? make_random_policy(seed)
         : which == 1 ? make_lru_policy()
                      : make_static_policy(even_weights(8, 8));
}

}  // namespace moesaic::test
