#pragma once
// Which blocks a cache keeps. The same objects decide in a run and in `bench cache-sim`.
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "memory/tiers/forecast.h"

namespace moesaic::tiers {

/// Decides by the order of uses alone, never by time: two runs keep and give up the same blocks. Used by one thread.
class CachePolicy {
 public:
  /// Whether a resident block can be given up now (it is not in use).
  using MayGo = std::function<bool(Block)>;

  virtual ~CachePolicy() = default;
  virtual std::string_view name() const noexcept = 0;
  /// A visit begins and will use `blocks`, in this order; a use() follows for each.
  virtual void begin_visit(const Visit& visit, std::span<const Block> blocks) = 0;
  /// A block is used, whether it is resident or not. Comes before the cache asks for a victim for it.
  virtual void use(Block block) = 0;
  virtual void admitted(Block block) = 0;  ///< is resident from now on
  virtual void removed(Block block) = 0;   ///< is no longer
  /// The cache is full: which resident block goes so that `newcomer` stays. The newcomer itself: it is used and not kept.
  virtual Block victim(Block newcomer, const MayGo& may_go) = 0;
  /// What to load ahead, in the order of use: certain or with at least that probability in the next `visits` visits. Empty
  /// for policies that know nothing of the future.
  virtual std::vector<Foreseen> prefetch(std::int64_t visits, double probability) const = 0;
};

/// The one whose next use is furthest goes, be it the newcomer; of equals the one with the largest number.
std::unique_ptr<CachePolicy> make_sched_policy(std::unique_ptr<Forecast> forecast);
/// The one that was not used for longest goes.
std::unique_ptr<CachePolicy> make_lru_policy();
/// Blocks have a fixed weight; the lightest goes, be it the newcomer; of equals the one with the largest number.
std::unique_ptr<CachePolicy> make_static_policy(std::vector<double> weights);
/// Any of those that may go, drawn from the seed. For tests.
std::unique_ptr<CachePolicy> make_random_policy(std::uint64_t seed);

/// Weights without measurements: equally many blocks of every layer, those of the lowest numbers.
std::vector<double> even_weights(std::int32_t layers, std::int32_t experts);

}  // namespace moesaic::tiers
