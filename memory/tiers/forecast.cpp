#include "memory/tiers/forecast.h"

#include <algorithm>
#include <limits>

#include <fmt/format.h>

#include "core/base/error.h"

namespace moesaic::tiers {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

}  // namespace

ScheduleForecast::ScheduleForecast(Options options) : options_(std::move(options)) {
  const Options& o = options_;
  MOESAIC_CHECK(o.layers > 0 && o.experts > 0 && !o.step.empty(),
                "a schedule of layers and experts");
  const std::size_t blocks =
      static_cast<std::size_t>(o.layers) * static_cast<std::size_t>(o.experts);
  probability_.assign(blocks, 1.0);
  due_.assign(blocks, 0);
  certain_.resize(blocks);
  forwards_.resize(static_cast<std::size_t>(o.layers));
  for (std::int64_t p = 0; p < length(); ++p) {
    MOESAIC_CHECK(visit_at(p).layer >= 0 && visit_at(p).layer < o.layers, "layers of the schedule");
    if (visit_at(p).kind == VisitKind::forward)
      forwards_[static_cast<std::size_t>(visit_at(p).layer)].push_back(p);
  }
}

// Where in the visits the block's turn comes.
double ScheduleForecast::place(std::int64_t position, Block block) const {
  const std::int64_t experts = options_.experts, expert = block % experts;
  const std::int64_t turn =
      visit_at(position).kind == VisitKind::backward ? experts - 1 - expert : expert;
  return static_cast<double>(position) + static_cast<double>(turn) / static_cast<double>(experts);
}

void ScheduleForecast::note_forward(const Visit& visit, std::span<const Block> blocks) {
  const Block first = static_cast<Block>(visit.layer) * options_.experts;
  for (Block b = first; b < first + options_.experts; ++b)
    probability_[index(b)] += options_.smoothing * (due_[index(b)] - probability_[index(b)]);
  // The visits of this step that use the same experts again.
  const std::int64_t end = (now_ / length() + 1) * length();
  for (std::int64_t p = now_ + 1; p < end; ++p) {
    const Visit& later = visit_at(p);
    const bool again =
        later.layer == visit.layer &&
        ((later.kind == VisitKind::backward && later.micro_batch == visit.micro_batch) ||
         (later.kind == VisitKind::update && options_.updates == Updates::touched));
    if (!again) continue;
    for (const Block b : blocks) {
      auto& list = certain_[index(b)];
      const auto at = std::lower_bound(list.begin(), list.end(), p);
      if (at == list.end() || *at != p) list.insert(at, p);
    }
  }
}

BlockRange ScheduleForecast::begin_visit(const Visit& visit, std::span<const Block> blocks) {
  ++now_;
  MOESAIC_CHECK(visit == visit_at(now_),
                fmt::format("visit {} is {} of layer {}, micro-batch {}; the schedule has {} of "
                            "layer {}, micro-batch {}",
                            now_,
                            name(visit.kind),
                            visit.layer,
                            visit.micro_batch,
                            name(visit_at(now_).kind),
                            visit_at(now_).layer,
                            visit_at(now_).micro_batch));
  const Block first = static_cast<Block>(visit.layer) * options_.experts;
  const BlockRange layer{first, first + options_.experts};
  for (Block b = layer.begin; b < layer.end; ++b) {
    due_[index(b)] = 0;
    auto& list = certain_[index(b)];
    list.erase(list.begin(), std::upper_bound(list.begin(), list.end(), now_));
  }
  for (const Block b : blocks) {
    MOESAIC_CHECK(b >= layer.begin && b < layer.end, "blocks of the visit's layer");
    due_[index(b)] = 1;
  }
  if (visit.kind == VisitKind::forward) note_forward(visit, blocks);
  return layer;
}

void ScheduleForecast::used(Block block) {
  due_[index(block)] = 0;
}

double ScheduleForecast::next_use(Block block) const {
  if (due_[index(block)] != 0) return place(now_, block);
  double next =
      certain_[index(block)].empty() ? kNever : place(certain_[index(block)].front(), block);
  const std::int64_t layer = block / options_.experts;
  const auto& forwards = forwards_[static_cast<std::size_t>(layer)];
  const double p = probability_[index(block)];
  if (!forwards.empty() && p > 0) {
    const std::int64_t start = std::max<std::int64_t>(now_, 0) / length() * length();
    const auto later = std::upper_bound(forwards.begin(), forwards.end(), now_ - start);
    const std::int64_t at =
        later != forwards.end() ? start + *later : start + length() + forwards.front();
    const double spacing = static_cast<double>(length()) / static_cast<double>(forwards.size());
    next = std::min(next, place(at, block) + (1 / p - 1) * spacing);
  }
  if (options_.updates == Updates::dense) {
    for (std::int64_t q = now_ + 1; q <= now_ + length(); ++q) {
      if (visit_at(q).kind != VisitKind::update || visit_at(q).layer != layer) continue;
      next = std::min(next, place(q, block));
      break;
    }
  }
  return next;
}

double ScheduleForecast::probability_at(std::int64_t position, Block block) const {
  const auto& certain = certain_[index(block)];
  const VisitKind kind = visit_at(position).kind;
  if (kind == VisitKind::forward) return probability_[index(block)];
  if (kind == VisitKind::update && options_.updates == Updates::dense) return 1;
  if (std::binary_search(certain.begin(), certain.end(), position)) return 1;
  return is_decided(position) ? 0 : probability_[index(block)];
}

// Whether the forwards whose experts a backward or an update uses have been.
bool ScheduleForecast::is_decided(std::int64_t position) const {
  const Visit& visit = visit_at(position);
  const std::int64_t start = position / length() * length();
  for (const std::int64_t f : forwards_[static_cast<std::size_t>(visit.layer)]) {
    const bool counts =
        visit.kind == VisitKind::update || visit_at(f).micro_batch == visit.micro_batch;
    if (counts && start + f > now_) return false;
  }
  return true;
}

std::vector<Foreseen> ScheduleForecast::foresee(std::int64_t visits, double probability) const {
  std::vector<Foreseen> list;
  for (std::int64_t p = now_ + 1; p <= now_ + visits; ++p) {
    const Visit& visit = visit_at(p);
    const Block first = static_cast<Block>(visit.layer) * options_.experts;
    for (std::int64_t i = 0; i < options_.experts; ++i) {
      const Block b = first + (visit.kind == VisitKind::backward ? options_.experts - 1 - i : i);
      if (const double chance = probability_at(p, b); chance >= probability)
        list.push_back({b, chance});
    }
  }
  return list;
}

ExactForecast::ExactForecast(std::vector<Block> uses, Block blocks)
    : positions_(static_cast<std::size_t>(blocks)) {
  for (std::size_t i = uses.size(); i-- > 0;)
    positions_.at(static_cast<std::size_t>(uses[i])).push_back(static_cast<std::int64_t>(i));
}
BlockRange ExactForecast::begin_visit(const Visit&, std::span<const Block>) {
  return {};
}
void ExactForecast::used(Block block) {
  auto& list = positions_.at(static_cast<std::size_t>(block));
  MOESAIC_CHECK(!list.empty(), "a use that was not foretold");
  list.pop_back();
}
double ExactForecast::next_use(Block block) const {
  const auto& list = positions_.at(static_cast<std::size_t>(block));
  return list.empty() ? kNever : static_cast<double>(list.back());
}
std::vector<Foreseen> ExactForecast::foresee(std::int64_t, double) const {
  return {};
}

}  // namespace moesaic::tiers
