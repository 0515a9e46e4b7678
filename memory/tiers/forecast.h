#pragma once
// When a block will be used next.
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "memory/tiers/visits.h"

namespace moesaic::tiers {

/// Blocks [begin, end).
struct BlockRange {
  Block begin = 0, end = 0;
};

/// A block that is likely to be used soon.
struct Foreseen {
  Block block = 0;
  double probability = 0;  ///< 1: certain
};

/// What is known of coming uses. Told of every visit and every use in their order.
class Forecast {
 public:
  virtual ~Forecast() = default;
  /// A visit begins; `blocks` will be used now, in this order. Or another part of the visit in progress does. Returns whose
  /// next use may have changed.
  virtual BlockRange begin_visit(const Visit& visit, std::span<const Block> blocks) = 0;
  /// A block of the visit was used.
  virtual void used(Block block) = 0;
  /// Position of the next use, on a scale that grows with time; infinite when there is none.
  virtual double next_use(Block block) const = 0;
  /// What the next `visits` visits will use with at least that probability, in the order of use.
  virtual std::vector<Foreseen> foresee(std::int64_t visits, double probability) const = 0;
};

/// From the schedule of a step, which repeats. What forward chose, its backward uses again (the routing is saved), so these
/// uses are certain; a forward uses an expert with probability p, a running average over the forwards of the layer, and is
/// expected after 1/p of them. The earlier of the two counts. Positions are visits, with the place in the visit's order as
/// fraction. Deterministic: depends on the visits alone.
class ScheduleForecast final : public Forecast {
 public:
  struct Options {
    std::vector<Visit> step;  ///< the visits of one step
    std::int32_t layers = 0, experts = 0;
    Updates updates = Updates::none;
    double smoothing = 0.2;  ///< weight of a new observation in p
    /// The visits that draw their blocks: forward for weights. Backward for gradients, whose schedule has no forward.
    VisitKind draws = VisitKind::forward;
    /// Layers that are frozen have no update; may all their visits be left out?
    bool may_skip = false;
  };
  explicit ScheduleForecast(Options options);

  /// The schedule's next visit (or one after updates that were left out), or once more the one in progress, be it with
  /// updates in between: it then uses these blocks as well. Throws InternalError for another.
  BlockRange begin_visit(const Visit& visit, std::span<const Block> blocks) override;
  void used(Block block) override;
  double next_use(Block block) const override;
  std::vector<Foreseen> foresee(std::int64_t visits, double probability) const override;
  double touch_probability(Block block) const { return probability_[index(block)]; }

 private:
  static std::size_t index(Block block) { return static_cast<std::size_t>(block); }
  std::int64_t length() const { return static_cast<std::int64_t>(options_.step.size()); }
  const Visit& visit_at(std::int64_t position) const {
    return options_.step[static_cast<std::size_t>(position % length())];
  }
  std::int64_t after_now(const std::vector<std::int64_t>& positions) const;
  bool move_on(const Visit& visit);
  double place(std::int64_t position, Block block) const;
  double probability_at(std::int64_t position, Block block) const;
  bool is_decided(std::int64_t position) const;
  void note_drawn(const Visit& visit, std::span<const Block> blocks, bool is_new);

  Options options_;
  std::int64_t now_ = -1;  ///< position of the visit in progress
  std::vector<double> probability_;
  std::vector<std::uint8_t> due_;  ///< of the visit in progress, not used yet
  std::vector<std::uint8_t>
      drawn_;  ///< by the visit in progress, or the layer's last one that drew
  std::vector<std::vector<std::int64_t>> certain_;  ///< positions to come, ascending, by block
  /// Positions in the step, by layer: of what draws, of updates, of what is neither.
  std::vector<std::vector<std::int64_t>> draws_, updates_, others_;
};

/// Told all uses beforehand: the exact next use.
class ExactForecast final : public Forecast {
 public:
  /// `uses` in their order; `blocks`: how many there are.
  ExactForecast(std::vector<Block> uses, Block blocks);
  BlockRange begin_visit(const Visit& visit, std::span<const Block> blocks) override;
  void used(Block block) override;
  double next_use(Block block) const override;
  std::vector<Foreseen> foresee(std::int64_t visits, double probability) const override;

 private:
  std::vector<std::vector<std::int64_t>> positions_;  ///< by block, descending: the next one last
};

}  // namespace moesaic::tiers
