#include "parallel/dispatch/plan_state.h"

#include <algorithm>

#include <fmt/format.h>

namespace moesaic {
namespace {

constexpr std::int64_t kAlignment = 256;

// Rows [begin(pass), begin(pass + 1)) of n belong to a pass.
std::int64_t begin_of(std::int64_t n, int pass, int passes) {
  return n * pass / passes;
}
// The most that a pass has.
std::int64_t most_of(std::int64_t n, int passes) {
  return (n + passes - 1) / passes;
}

// Of `count` rows that are rows `first`, … of a list of n: those that belong to a pass.
struct Part {
  std::int64_t skipped = 0, rows = 0;
};
Part part_of(std::int64_t first, std::int64_t count, std::int64_t n, int pass, int passes) {
  const auto inside = [&](std::int64_t row) {
    return std::clamp<std::int64_t>(row - first, 0, count);
  };
  const std::int64_t begin = inside(begin_of(n, pass, passes));
  return {begin, inside(begin_of(n, pass + 1, passes)) - begin};
}

// Where a row that is row `row` of n comes.
int pass_with(std::int64_t row, std::int64_t n, int passes) {
  int pass = 0;
  while (pass + 1 < passes && begin_of(n, pass + 1, passes) <= row)
    ++pass;
  return pass;
}

// A run that goes on where the last one to the same rank ended is one with it, if both sides see that.
void append(std::vector<RowRun>& runs, const RowRun& run, bool joins) {
  if (run.rows == 0) return;
  if (joins && !runs.empty() && runs.back().peer == run.peer) {
    runs.back().rows += run.rows;
  } else {
    runs.push_back(run);
  }
}

// Parts of the rows of a rank whose node is `node`, by the number of nodes that they come over.
int num_parts(const HopTable& table) {
  return 1 + (table.nodes - 1) * table.lots;
}
struct PartOfNode {
  int node = 0, first_lot = 0, last_lot = 0;
};
PartOfNode part_of_node(const HopTable& table, int node, int part) {
  if (part == 0) return {node, 0, table.lots - 1};
  const int lot = (part - 1) % table.lots;
  return {(node + 1 + (part - 1) / table.lots) % table.nodes, lot, lot};
}

}  // namespace

Transfer Transfer::reversed() const {
  Transfer back{receives, sends};
  for (RowRun& run : back.receives)
    run.first = run.home;
  return back;
}

std::int64_t Transfer::received() const {
  std::int64_t sum = 0;
  for (const RowRun& run : receives)
    sum += run.rows;
  return sum;
}

std::vector<Arrival> arrivals_of(const HopTable& table,
                                 const NodeGrid& grid,
                                 std::size_t hop,
                                 int to) {
  std::vector<Arrival> list;
  if (table.fanned.empty() || hop + 2 < table.rows.size()) {
    for (int i = 0; i < table.ranks; ++i) {
      const int from = (to + i) % table.ranks;
      list.push_back({0, from, table.at(hop, from, to)});
    }
    return list;
  }
  const bool crosses = hop + 2 == table.rows.size();
  const int node = grid.node_of(to), per_node = grid.per_node;
  for (int part = 0; part < num_parts(table); ++part) {
    const PartOfNode of = part_of_node(table, node, part);
    for (int i = 0; i < (crosses ? 1 : per_node); ++i) {
      const int number = (grid.number_of(to) + i) % per_node,
                crossing = of.node * per_node + number;
      Arrival a{part, crosses ? crossing : node * per_node + number};
      for (int lot = of.first_lot; lot <= of.last_lot; ++lot)
        a.rows +=
            crosses ? table.crossed_at(crossing, node, lot) : table.fanned_at(crossing, lot, to);
      list.push_back(a);
    }
  }
  return list;
}

Transfer pass_of(const PlanHop& hop, int pass, int passes) {
  Transfer plan;
  for (const Lane& lane : hop.sends) {
    const Part part = part_of(
        lane.earlier, lane.rows, hop.sent_to[static_cast<std::size_t>(lane.peer)], pass, passes);
    append(plan.sends,
           {lane.peer, part.rows, lane.first + part.skipped, lane.home + part.skipped},
           hop.one_sender);
  }
  std::int64_t landed = 0;
  for (const Lane& lane : hop.receives) {
    const std::int64_t rows = part_of(lane.earlier, lane.rows, hop.received, pass, passes).rows;
    append(plan.receives, {lane.peer, rows, landed}, hop.one_sender);
    landed += rows;
  }
  return plan;
}

namespace {
// By part, of the rows of a node's ranks.
struct Steps {
  std::vector<int> needed, spent;
};
Steps steps_of(const HopTable& table, const NodeGrid& grid, int node, int passes) {
  const auto parts = static_cast<std::size_t>(num_parts(table));
  Steps steps{std::vector<int>(parts, passes - 1), std::vector<int>(parts, 0)};
  for (int to = node * grid.per_node; to < (node + 1) * grid.per_node; ++to) {
    std::vector<std::int64_t> ends(parts, 0);
    std::int64_t all = 0;
    for (const Arrival& a : arrivals_of(table, grid, table.rows.size() - 1, to))
      ends[static_cast<std::size_t>(a.part)] = all += a.rows;
    std::int64_t begin = 0;
    for (std::size_t part = 0; part < parts; begin = ends[part++]) {
      const std::int64_t last = std::max<std::int64_t>(0, ends[part] - 1);
      steps.needed[part] = std::min(steps.needed[part], pass_with(begin, all, passes));
      steps.spent[part] = std::max(steps.spent[part], pass_with(last, all, passes));
    }
  }
  return steps;
}
}  // namespace

void set_steps(PlanHop& hop, const HopTable& table, const NodeGrid& grid, int rank, int passes) {
  const auto set = [](Lane& lane, const Steps& steps) {
    lane.needed = steps.needed[static_cast<std::size_t>(lane.part)];
    lane.spent = steps.spent[static_cast<std::size_t>(lane.part)];
  };
  std::vector<Steps> of_node;
  for (int node = 0; node < grid.nodes; ++node)
    of_node.push_back(steps_of(table, grid, node, passes));
  for (Lane& lane : hop.sends)
    set(lane, of_node[static_cast<std::size_t>(grid.node_of(lane.peer))]);
  for (Lane& lane : hop.receives)
    set(lane, of_node[static_cast<std::size_t>(grid.node_of(rank))]);
}

Transfer step_of(const PlanHop& hop, int pass, int Lane::*when) {
  Transfer plan;
  for (const Lane& lane : hop.sends) {
    if (lane.*when == pass)
      append(plan.sends, {lane.peer, lane.rows, lane.first, lane.home}, hop.one_sender);
  }
  for (const Lane& lane : hop.receives) {
    if (lane.*when == pass)
      append(plan.receives, {lane.peer, lane.rows, lane.earlier}, hop.one_sender);
  }
  return plan;
}

int passes_for(const HopTable& table,
               std::int64_t rows,
               std::int64_t copies,
               std::int64_t choices,
               int passes) {
  const std::size_t last = table.rows.size() - 1;
  const auto fits = [&](int n) {
    for (int to = 0; to < table.ranks; ++to) {
      std::int64_t all = 0;
      for (int from = 0; from < table.ranks; ++from)
        all += table.at(last, from, to);
      if (all == 0) continue;
      MOESAIC_CHECK(rows >= 1 && copies >= choices, "no row fits");
      const std::int64_t got = most_of(all, n);
      if (got > rows) return false;
      if (table.copies[static_cast<std::size_t>(to)] > copies && got * choices > copies)
        return false;
    }
    return true;
  };
  while (!fits(passes))
    ++passes;
  return passes;
}

TensorView PlanMemory::take(Shape shape, DType dtype) {
  const auto size = static_cast<std::int64_t>(byte_size(dtype)) * shape.numel();
  const std::int64_t at = used_;
  used_ = (used_ + std::max<std::int64_t>(1, size) + kAlignment - 1) / kAlignment * kAlignment;
  if (memory_.empty()) return {nullptr, dtype, shape, memory_.device()};
  MOESAIC_CHECK(used_ <= static_cast<std::int64_t>(memory_.bytes()),
                fmt::format("a plan's memory has {} bytes, too few", memory_.bytes()));
  return {memory_.data() + at, dtype, shape, memory_.device()};
}

ExchangePlan::ExchangePlan(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ExchangePlan::~ExchangePlan() = default;
ExchangePlan::ExchangePlan(ExchangePlan&&) noexcept = default;

int ExchangePlan::passes() const noexcept {
  return impl_->passes;
}

std::span<const std::int64_t> ExchangePlan::expert_rows() const {
  return impl_->expert_rows;
}

std::int64_t ExchangePlan::rows(int pass) const {
  MOESAIC_CHECK(impl_->finished && 0 <= pass && pass < impl_->passes, "no such pass");
  return pass_of(impl_->hops.back(), pass, impl_->passes).received();
}

}  // namespace moesaic
