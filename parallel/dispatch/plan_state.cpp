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

}  // namespace

AllToAllPlan pass_of(const PlanHop& hop, int pass, int passes) {
  const std::size_t ranks = hop.send_rows.size();
  AllToAllPlan plan;
  for (std::size_t p = 0; p < ranks; ++p) {
    const Part part = part_of(hop.sent_earlier[p], hop.send_rows[p], hop.sent_to[p], pass, passes);
    plan.send_offset.push_back(hop.send_offset[p] + part.skipped);
    plan.send_rows.push_back(part.rows);
  }
  plan.recv_rows.assign(ranks, 0);
  plan.recv_offset.assign(ranks, 0);
  std::int64_t earlier = 0, landed = 0;
  for (std::size_t i = 0; i < ranks; ++i) {
    const std::size_t p = (static_cast<std::size_t>(hop.rank) + i) % ranks;
    const Part part = part_of(earlier, hop.recv_rows[p], hop.received, pass, passes);
    plan.recv_offset[p] = landed;
    plan.recv_rows[p] = part.rows;
    earlier += hop.recv_rows[p];
    landed += part.rows;
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
  std::int64_t sum = 0;
  for (const std::int64_t n : pass_of(impl_->hops.back(), pass, impl_->passes).recv_rows)
    sum += n;
  return sum;
}

}  // namespace moesaic
