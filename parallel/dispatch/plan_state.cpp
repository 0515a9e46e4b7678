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
std::int64_t part_of(std::int64_t n, int pass, int passes) {
  return begin_of(n, pass + 1, passes) - begin_of(n, pass, passes);
}

}  // namespace

AllToAllPlan pass_of(const PlanHop& hop, int pass, int passes) {
  AllToAllPlan plan;
  std::int64_t landed = 0;
  for (std::size_t p = 0; p < hop.send_rows.size(); ++p) {
    plan.send_offset.push_back(hop.send_offset[p] + begin_of(hop.send_rows[p], pass, passes));
    plan.send_rows.push_back(part_of(hop.send_rows[p], pass, passes));
    plan.recv_offset.push_back(landed);
    plan.recv_rows.push_back(part_of(hop.recv_rows[p], pass, passes));
    landed += plan.recv_rows.back();
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
      for (int pass = 0; pass < n; ++pass) {
        std::int64_t got = 0;
        for (int from = 0; from < table.ranks; ++from)
          got += part_of(table.at(last, from, to), pass, n);
        if (got > rows) return false;
        if (table.copies[static_cast<std::size_t>(to)] > copies && got * choices > copies)
          return false;
      }
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

std::int64_t ExchangePlan::rows(int pass) const {
  MOESAIC_CHECK(impl_->finished && 0 <= pass && pass < impl_->passes, "no such pass");
  std::int64_t sum = 0;
  for (const std::int64_t n : pass_of(impl_->hops.back(), pass, impl_->passes).recv_rows)
    sum += n;
  return sum;
}

}  // namespace moesaic
