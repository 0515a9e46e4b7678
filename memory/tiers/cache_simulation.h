#pragma once
#include <cstdint>
#include <vector>

#include "memory/tiers/policy.h"
#include "memory/tiers/touch_log.h"

namespace moesaic::tiers {

/// What a cache of equal slots did.
struct CacheCounts {
  std::int64_t uses = 0, hits = 0;
  std::int64_t passed = 0;      ///< loads that were used and not kept
  std::int64_t foreseen = 0;    ///< uses that prefetch() had named before their visit
  std::int64_t unneeded = 0;    ///< named, and not used in the visit
  std::int64_t file_loads = 0;  ///< loads of blocks that live in the file
  std::int64_t loads() const { return uses - hits; }
  double hit_rate() const {
    return uses == 0 ? 0 : static_cast<double>(hits) / static_cast<double>(uses);
  }
  bool operator==(const CacheCounts&) const = default;
};

struct SimulationOptions {
  std::int64_t slots = 0;
  std::int64_t first_counted_step = 0;  ///< earlier ones fill the cache and count nowhere
  double prefetch_probability = 0.5;    ///< from which a use counts as foreseen
  std::vector<std::uint8_t> in_file;    ///< by block; empty: none
};

/// Plays a log through a policy, block by block, in the order of uses.
CacheCounts simulate(const TouchLog& log, CachePolicy& policy, const SimulationOptions& options);

/// The most hits that any policy can have over the whole log, with a cache that is empty at first and need not keep what
/// was used (Belady's rule, with hindsight). Steps before `first_counted_step` are played and not counted; then it is the
/// rule's result on the rest, which a policy can in principle exceed by what it had in the cache at that point.
CacheCounts belady(const TouchLog& log, std::int64_t slots, std::int64_t first_counted_step = 0);

/// How often each block was used in the steps before `end`.
std::vector<double> use_counts(const TouchLog& log, std::int64_t end);

}  // namespace moesaic::tiers
