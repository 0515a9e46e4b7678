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
  drawn_.assign(blocks, 0);
  certain_.resize(blocks);
  for (auto* list : {&draws_, &updates_, &others_})
    list->resize(static_cast<std::size_t>(o.layers));
  for (std::int64_t p = 0; p < length(); ++p) {
    const Visit& visit = visit_at(p);
    MOESAIC_CHECK(visit.layer >= 0 && visit.layer < o.layers, "layers of the schedule");
    auto& list = visit.kind == o.draws             ? draws_
                 : visit.kind == VisitKind::update ? updates_
                                                   : others_;
    list[static_cast<std::size_t>(visit.layer)].push_back(p);
  }
}

// The next one of positions in the step, of this step or the next; negative when there is none.
std::int64_t ScheduleForecast::after_now(const std::vector<std::int64_t>& positions) const {
  if (positions.empty()) return -1;
  const std::int64_t start = std::max<std::int64_t>(now_, 0) / length() * length();
  const auto later = std::upper_bound(positions.begin(), positions.end(), now_ - start);
  return later != positions.end() ? start + *later : start + length() + positions.front();
}

// Where in the visits the block's turn comes.
double ScheduleForecast::place(std::int64_t position, Block block) const {
  const std::int64_t experts = options_.experts, expert = block % experts;
  const std::int64_t turn =
      visit_at(position).kind == VisitKind::backward ? experts - 1 - expert : expert;
  return static_cast<double>(position) + static_cast<double>(turn) / static_cast<double>(experts);
}

// `is_new`: not a further part of the visit in progress.
void ScheduleForecast::note_drawn(const Visit& visit, std::span<const Block> blocks, bool is_new) {
  const Block first = static_cast<Block>(visit.layer) * options_.experts;
  if (is_new) {
    for (Block b = first; b < first + options_.experts; ++b) {
      drawn_[index(b)] = 0;
      probability_[index(b)] *= 1 - options_.smoothing;
    }
  }
  for (const Block b : blocks) {
    if (drawn_[index(b)] != 0) continue;
    drawn_[index(b)] = 1;
    probability_[index(b)] += options_.smoothing;
  }
  // The visits of this step that use the same experts again; its update may come in the next step.
  const std::int64_t start = now_ / length() * length();
  const auto use_again = [&](const std::vector<std::int64_t>& positions, bool by_update) {
    for (const std::int64_t in_step : positions) {
      const bool is_over = start + in_step <= now_;
      const std::int64_t p = start + in_step + (is_over && by_update ? length() : 0);
      if (p <= now_ || (!by_update && visit_at(p).micro_batch != visit.micro_batch)) continue;
      for (const Block b : blocks) {
        auto& list = certain_[index(b)];
        const auto at = std::lower_bound(list.begin(), list.end(), p);
        if (at == list.end() || *at != p) list.insert(at, p);
      }
    }
  };
  const auto layer = static_cast<std::size_t>(visit.layer);
  use_again(others_[layer], false);
  if (options_.updates == Updates::touched) use_again(updates_[layer], true);
}

// Whether the visit is the next one, rather than a further part of the one in progress.
bool ScheduleForecast::move_on(const Visit& visit) {
  if (visit == visit_at(now_ + 1)) {
    ++now_;
    return true;
  }
  // Updates beside a forward may come between its parts.
  std::int64_t in_progress = now_;
  while (in_progress >= 0 && visit.kind != VisitKind::update &&
         visit_at(in_progress).kind == VisitKind::update)
    --in_progress;
  if (in_progress >= 0 && visit == visit_at(in_progress)) return false;
  for (std::int64_t p = now_ + 2; p <= now_ + length(); ++p) {
    if (!options_.may_skip && visit_at(p - 1).kind != VisitKind::update) break;
    if (visit != visit_at(p)) continue;
    now_ = p;
    return true;
  }
  const Visit& next = visit_at(now_ + 1);
  throw InternalError(
      fmt::format("visit {} is {} of layer {}, micro-batch {}; the schedule has {} of "
                  "layer {}, micro-batch {}",
                  now_ + 1,
                  name(visit.kind),
                  visit.layer,
                  visit.micro_batch,
                  name(next.kind),
                  next.layer,
                  next.micro_batch));
}

BlockRange ScheduleForecast::begin_visit(const Visit& visit, std::span<const Block> blocks) {
  const bool is_new = move_on(visit);
  const Block first = static_cast<Block>(visit.layer) * options_.experts;
  const BlockRange layer{first, first + options_.experts};
  for (Block b = layer.begin; is_new && b < layer.end; ++b) {
    due_[index(b)] = 0;
    auto& list = certain_[index(b)];
    list.erase(list.begin(), std::upper_bound(list.begin(), list.end(), now_));
  }
  for (const Block b : blocks) {
    MOESAIC_CHECK(b >= layer.begin && b < layer.end, "blocks of the visit's layer");
    due_[index(b)] = 1;
  }
  if (visit.kind == options_.draws) note_drawn(visit, blocks, is_new);
  return layer;
}

void ScheduleForecast::used(Block block) {
  due_[index(block)] = 0;
}

double ScheduleForecast::next_use(Block block) const {
  if (due_[index(block)] != 0) return place(now_, block);
  double next =
      certain_[index(block)].empty() ? kNever : place(certain_[index(block)].front(), block);
  const auto layer = static_cast<std::size_t>(block / options_.experts);
  const double p = probability_[index(block)];
  if (const std::int64_t at = after_now(draws_[layer]); at >= 0 && p > 0) {
    const double spacing =
        static_cast<double>(length()) / static_cast<double>(draws_[layer].size());
    next = std::min(next, place(at, block) + (1 / p - 1) * spacing);
  }
  if (options_.updates == Updates::dense) {
    if (const std::int64_t at = after_now(updates_[layer]); at >= 0)
      next = std::min(next, place(at, block));
  }
  return next;
}

double ScheduleForecast::probability_at(std::int64_t position, Block block) const {
  const auto& certain = certain_[index(block)];
  const VisitKind kind = visit_at(position).kind;
  if (kind == options_.draws) return probability_[index(block)];
  if (kind == VisitKind::update && options_.updates == Updates::dense) return 1;
  if (std::binary_search(certain.begin(), certain.end(), position)) return 1;
  return is_decided(position) ? 0 : probability_[index(block)];
}

// Whether the visits whose experts another one uses again have been. Of an update that comes before forwards of its layer these
// are the forwards of the step before.
bool ScheduleForecast::is_decided(std::int64_t position) const {
  const Visit& visit = visit_at(position);
  const std::int64_t start = position / length() * length();
  for (const std::int64_t f : draws_[static_cast<std::size_t>(visit.layer)]) {
    const bool counts = visit.kind == VisitKind::update
                            ? start + f < position
                            : visit_at(f).micro_batch == visit.micro_batch;
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
