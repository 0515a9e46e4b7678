#include "memory/tiers/policy.h"

#include <limits>
#include <set>
#include <unordered_map>
#include <utility>

#include "core/base/error.h"
#include "core/base/random.h"

namespace moesaic::tiers {
namespace {

// Residents in the order in which they go: the highest score first, of equal ones the largest block.
class Ranking {
 public:
  bool holds(Block block) const { return scores_.count(block) > 0; }
  void put(Block block, double score) {
    take(block);
    scores_[block] = score;
    order_.insert({score, block});
  }
  void take(Block block) {
    const auto found = scores_.find(block);
    if (found == scores_.end()) return;
    order_.erase({found->second, block});
    scores_.erase(found);
  }
  /// The first that may go and goes before (score, block); else `block`.
  Block first(Block block, double score, const CachePolicy::MayGo& may_go) const {
    for (auto it = order_.rbegin(); it != order_.rend() && *it > std::pair(score, block); ++it)
      if (may_go(it->second)) return it->second;
    return block;
  }

 private:
  std::unordered_map<Block, double> scores_;
  std::set<std::pair<double, Block>> order_;
};

class SchedPolicy final : public CachePolicy {
 public:
  explicit SchedPolicy(std::unique_ptr<Forecast> forecast) : forecast_(std::move(forecast)) {}
  std::string_view name() const noexcept override { return "sched"; }
  void begin_visit(const Visit& visit, std::span<const Block> blocks) override {
    const BlockRange changed = forecast_->begin_visit(visit, blocks);
    for (Block b = changed.begin; b < changed.end; ++b)
      rescore(b);
  }
  void use(Block block) override {
    forecast_->used(block);
    rescore(block);
  }
  void admitted(Block block) override { ranking_.put(block, forecast_->next_use(block)); }
  void removed(Block block) override { ranking_.take(block); }
  Block victim(Block newcomer, const MayGo& may_go) override {
    return ranking_.first(newcomer, forecast_->next_use(newcomer), may_go);
  }
  std::vector<Foreseen> prefetch(std::int64_t visits, double probability) const override {
    return forecast_->foresee(visits, probability);
  }

 private:
  void rescore(Block block) {
    if (ranking_.holds(block)) ranking_.put(block, forecast_->next_use(block));
  }
  std::unique_ptr<Forecast> forecast_;
  Ranking ranking_;
};

// Policies that are not told of visits and look at no future.
class PastPolicy : public CachePolicy {
 public:
  void begin_visit(const Visit&, std::span<const Block>) override {}
  std::vector<Foreseen> prefetch(std::int64_t, double) const override { return {}; }
};

class LruPolicy final : public PastPolicy {
 public:
  std::string_view name() const noexcept override { return "lru"; }
  void use(Block block) override {
    if (ranking_.holds(block)) admitted(block);
  }
  void admitted(Block block) override { ranking_.put(block, -static_cast<double>(++now_)); }
  void removed(Block block) override { ranking_.take(block); }
  Block victim(Block newcomer, const MayGo& may_go) override {
    return ranking_.first(newcomer, -std::numeric_limits<double>::infinity(), may_go);
  }

 private:
  std::int64_t now_ = 0;  // exact in a double up to 2^53 uses
  Ranking ranking_;
};

class StaticPolicy final : public PastPolicy {
 public:
  explicit StaticPolicy(std::vector<double> weights) : weights_(std::move(weights)) {}
  std::string_view name() const noexcept override { return "static"; }
  void use(Block) override {}
  void admitted(Block block) override { ranking_.put(block, score(block)); }
  void removed(Block block) override { ranking_.take(block); }
  Block victim(Block newcomer, const MayGo& may_go) override {
    return ranking_.first(newcomer, score(newcomer), may_go);
  }

 private:
  double score(Block block) const { return -weights_.at(static_cast<std::size_t>(block)); }
  std::vector<double> weights_;
  Ranking ranking_;
};

class RandomPolicy final : public PastPolicy {
 public:
  explicit RandomPolicy(std::uint64_t seed) : key_(mix64(seed ^ hash_name("cache policy"))) {}
  std::string_view name() const noexcept override { return "random"; }
  void use(Block) override {}
  void admitted(Block block) override {
    if (places_.emplace(block, residents_.size()).second) residents_.push_back(block);
  }
  void removed(Block block) override {
    const auto found = places_.find(block);
    if (found == places_.end()) return;
    const std::size_t place = found->second;
    places_.erase(found);
    if (residents_.back() != block) {
      residents_[place] = residents_.back();
      places_[residents_[place]] = place;
    }
    residents_.pop_back();
  }
  Block victim(Block newcomer, const MayGo& may_go) override {
    const std::size_t n = residents_.size();
    const auto start = static_cast<std::size_t>(uniform(key_, draws_++) * static_cast<double>(n));
    for (std::size_t i = 0; i < n; ++i)
      if (const Block b = residents_[(start + i) % n]; may_go(b)) return b;
    return newcomer;
  }

 private:
  std::uint64_t key_, draws_ = 0;
  std::vector<Block> residents_;
  std::unordered_map<Block, std::size_t> places_;
};

}  // namespace

std::unique_ptr<CachePolicy> make_sched_policy(std::unique_ptr<Forecast> forecast) {
  return std::make_unique<SchedPolicy>(std::move(forecast));
}
std::unique_ptr<CachePolicy> make_lru_policy() {
  return std::make_unique<LruPolicy>();
}
std::unique_ptr<CachePolicy> make_static_policy(std::vector<double> weights) {
  return std::make_unique<StaticPolicy>(std::move(weights));
}
std::unique_ptr<CachePolicy> make_random_policy(std::uint64_t seed) {
  return std::make_unique<RandomPolicy>(seed);
}

std::vector<double> even_weights(std::int32_t layers, std::int32_t experts) {
  std::vector<double> weights;
  for (std::int32_t l = 0; l < layers; ++l)
    for (std::int32_t e = 0; e < experts; ++e)
      weights.push_back(-static_cast<double>(e));
  return weights;
}

}  // namespace moesaic::tiers
