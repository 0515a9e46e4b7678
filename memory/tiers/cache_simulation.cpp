#include "memory/tiers/cache_simulation.h"

#include <limits>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "core/base/error.h"

namespace moesaic::tiers {

CacheCounts simulate(const TouchLog& log, CachePolicy& policy, const SimulationOptions& options) {
  MOESAIC_CHECK(options.slots >= 0, "slots of a cache");
  const auto blocks = static_cast<std::size_t>(log.blocks());
  std::vector<std::uint8_t> resident(blocks, 0), named(blocks, 0);
  std::int64_t residents = 0;
  CacheCounts counts;
  const CachePolicy::MayGo any = [](Block) { return true; };
  for (const TouchLog::Entry& entry : log.entries) {
    const bool counted = entry.step >= options.first_counted_step;
    const auto prefetch =
        counted ? policy.prefetch(1, options.prefetch_probability) : std::vector<Foreseen>{};
    for (const Foreseen& f : prefetch)
      named[static_cast<std::size_t>(f.block)] = 1;
    policy.begin_visit(entry.visit, entry.blocks);
    for (const Block b : entry.blocks) {
      const auto i = static_cast<std::size_t>(b);
      policy.use(b);
      const bool hit = resident[i] != 0;
      if (counted) {
        ++counts.uses;
        counts.hits += hit ? 1 : 0;
        counts.foreseen += named[i];
        if (!hit && !options.in_file.empty()) counts.file_loads += options.in_file.at(i);
      }
      named[i] = 0;
      if (hit) continue;
      bool keep = residents < options.slots;
      if (!keep && options.slots > 0) {
        const Block out = policy.victim(b, any);
        if (out != b) {
          MOESAIC_CHECK(resident.at(static_cast<std::size_t>(out)) != 0, "a victim is resident");
          policy.removed(out);
          resident[static_cast<std::size_t>(out)] = 0;
          --residents;
          keep = true;
        }
      }
      if (keep) {
        policy.admitted(b);
        resident[i] = 1;
        ++residents;
      } else if (counted) {
        ++counts.passed;
      }
    }
    for (const Foreseen& f : prefetch) {
      counts.unneeded += named[static_cast<std::size_t>(f.block)];
      named[static_cast<std::size_t>(f.block)] = 0;
    }
  }
  return counts;
}

CacheCounts belady(const TouchLog& log, std::int64_t slots, std::int64_t first_counted_step) {
  std::vector<Block> uses;
  std::size_t counted_from = 0;
  for (const TouchLog::Entry& e : log.entries) {
    if (e.step < first_counted_step) counted_from += e.blocks.size();
    uses.insert(uses.end(), e.blocks.begin(), e.blocks.end());
  }
  constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();
  std::vector<std::size_t> next(uses.size(), kNever);
  std::unordered_map<Block, std::size_t> seen;
  for (std::size_t i = uses.size(); i-- > 0;) {
    if (const auto found = seen.find(uses[i]); found != seen.end()) next[i] = found->second;
    seen[uses[i]] = i;
  }
  // The cache as the set of positions at which its blocks are used next.
  std::set<std::size_t> coming;
  CacheCounts counts;
  for (std::size_t i = 0; i < uses.size(); ++i) {
    const bool hit = coming.erase(i) > 0;
    if (i >= counted_from) {
      ++counts.uses;
      counts.hits += hit ? 1 : 0;
    }
    if (next[i] == kNever) continue;
    if (static_cast<std::int64_t>(coming.size()) < slots) {
      coming.insert(next[i]);
    } else if (slots > 0 && *coming.rbegin() > next[i]) {
      coming.erase(std::prev(coming.end()));
      coming.insert(next[i]);
    }
  }
  return counts;
}

std::vector<double> use_counts(const TouchLog& log, std::int64_t end) {
  std::vector<double> counts(static_cast<std::size_t>(log.blocks()), 0);
  for (const TouchLog::Entry& e : log.entries) {
    if (e.step >= end) break;
    for (const Block b : e.blocks)
      ++counts[static_cast<std::size_t>(b)];
  }
  return counts;
}

}  // namespace moesaic::tiers
