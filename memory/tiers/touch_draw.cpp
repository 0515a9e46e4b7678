#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/base/error.h"
#include "core/base/random.h"
#include "memory/tiers/touch_log.h"

namespace moesaic::tiers {
namespace {

// Which expert has which rank of popularity, by layer.
class Popularity {
 public:
  explicit Popularity(const TouchOptions& o) : o_(o) {
    for (std::int32_t l = 0; l < o.layers; ++l) {
      std::vector<std::size_t> order(static_cast<std::size_t>(o.experts));
      std::iota(order.begin(), order.end(), std::size_t{0});
      for (std::size_t i = order.size(); i > 1; --i)
        std::swap(order[i - 1], order[draw(i)]);
      ranks_.push_back(std::move(order));
    }
    std::vector<double> weights;
    for (std::int32_t r = 0; r < o.experts; ++r)
      weights.push_back(std::pow(r + 1.0, -o.zipf));
    for (const double q : choice_probabilities(weights, o.top_k)) {
      const auto tokens = static_cast<double>(
          o.order == VisitOrder::vertical ? o.tokens * o.micro_batches : o.tokens);
      used_.push_back(q >= 1 ? 1.0 : -std::expm1(tokens * std::log1p(-q)));
    }
  }
  void drift() {
    const auto swaps = static_cast<std::int64_t>(std::llround(o_.drift * o_.experts / 2));
    for (auto& order : ranks_)
      for (std::int64_t i = 0; i < swaps; ++i) {
        const std::size_t a = draw(order.size());
        std::swap(order[a], order[draw(order.size())]);
      }
  }
  std::vector<Block> touched(std::int32_t layer) {
    const auto& order = ranks_[static_cast<std::size_t>(layer)];
    std::vector<Block> blocks;
    for (std::size_t e = 0; e < order.size(); ++e)
      if (uniform(key_, count_++) < used_[order[e]])
        blocks.push_back(static_cast<Block>(layer) * o_.experts + static_cast<Block>(e));
    return blocks;
  }

 private:
  std::size_t draw(std::size_t n) {
    return static_cast<std::size_t>(uniform(key_, count_++) * static_cast<double>(n));
  }
  const TouchOptions& o_;
  std::uint64_t key_ = mix64(o_.seed ^ hash_name("touches")), count_ = 0;
  std::vector<std::vector<std::size_t>> ranks_;  ///< of the experts
  std::vector<double> used_;                     ///< probability of a use in a visit, by rank
};

}  // namespace

std::vector<double> choice_probabilities(const std::vector<double>& weights, std::int64_t top_k) {
  const auto n = static_cast<std::int64_t>(weights.size());
  MOESAIC_CHECK(top_k > 0 && top_k <= n, "a token chooses among different experts");
  std::vector<std::size_t> order(weights.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return weights[a] > weights[b];
  });
  double rest = std::accumulate(weights.begin(), weights.end(), 0.0);
  auto left = static_cast<double>(top_k);
  std::vector<double> probabilities(weights.size());
  for (const std::size_t e : order) {
    // The heaviest first: once one is below 1, all lighter ones are.
    const double q = rest > 0 ? std::min(1.0, left * weights[e] / rest) : 0.0;
    probabilities[e] = q;
    if (q < 1) continue;
    left -= 1;
    rest -= weights[e];
  }
  return probabilities;
}

TouchLog draw_touch_log(const TouchOptions& o) {
  TouchLog log{.layers = o.layers,
               .experts = o.experts,
               .expert_bytes = o.expert_bytes,
               .state_bytes = o.state_bytes,
               .updates = o.updates};
  const std::vector<Visit> step = step_visits(o.layers, o.micro_batches, o.order, o.updates);
  Popularity popularity(o);
  TouchFiller filler(log);
  for (std::int64_t s = 0; s < o.steps; ++s) {
    if (s > 0) popularity.drift();
    for (const Visit& v : step) {
      const auto touched =
          v.kind == VisitKind::forward ? popularity.touched(v.layer) : std::vector<Block>{};
      log.entries.push_back({s, v, filler.blocks(s, v, touched)});
    }
  }
  return log;
}

}  // namespace moesaic::tiers
