#include "parallel/dispatch/exchange.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "kernels/ops/elementwise.h"
#include "kernels/ops/quant.h"
#include "parallel/dispatch/exchange_impl.h"
#include "parallel/dispatch/volumes.h"

namespace moesaic {
namespace {

std::string text_of(const ExchangeOptions& o) {
  return fmt::format(
      "{}, {} x {} ranks, {} experts and {} replicas a rank, {} choices, {} tokens at most, "
      "weights {}, buffers {}, "
      "chunks {}, experts counted {}, verify {}",
      name(o.method),
      o.grid.nodes,
      o.grid.per_node,
      o.experts,
      o.replicas,
      o.choices,
      o.max_tokens,
      name(o.weights),
      o.buffer_factor,
      o.chunks,
      o.count_experts,
      o.verify);
}

void check_options(Communicator* group, const ExchangeOptions& o) {
  const int size = group == nullptr ? o.grid.ranks() : group->size();
  if (o.grid.ranks() != size) {
    throw UsageError(fmt::format("{} nodes of {} ranks are not the {} ranks of the expert group",
                                 o.grid.nodes,
                                 o.grid.per_node,
                                 size));
  }
  if (o.experts < 1 || o.experts % size != 0) {
    throw UsageError(
        fmt::format("{} experts cannot be shared out equally among {} ranks", o.experts, size));
  }
  MOESAIC_CHECK(1 <= o.choices && o.choices <= ExchangeGroups::kMaxChoices,
                fmt::format("{} choices per token", o.choices));
  MOESAIC_CHECK(o.max_tokens >= 0 && o.replicas >= 0 && o.buffer_factor >= 0 && o.chunks >= 1,
                "negative sizes");
  MOESAIC_CHECK(size * o.max_tokens * o.choices < (std::int64_t{1} << 31),
                "more rows than 32 bits count");
  if (group == nullptr) return;
  const auto all = group->all_gather_host(text_of(o));
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r] != all[0]) {
      throw UsageError(fmt::format(
          "ranks exchange tokens differently: rank 0 {}; rank {} {}", all[0], r, all[r]));
    }
  }
}

ExchangeBounds bounds_of(const ExchangeOptions& o) {
  const HopList hops = hops_of(o.method);
  const auto most = [&](int hop) {
    return most_rows(o.method, o.grid, o.max_tokens, o.choices, hop);
  };
  ExchangeBounds b;
  const std::int64_t per_row = o.method == ExchangeMethod::pair ? 1 : o.choices;
  const auto of_chunk = [&](std::int64_t rows) { return (rows + o.chunks - 1) / o.chunks; };
  b.rows = of_chunk(most(hops.size));
  b.copies = b.rows * per_row;
  if (o.buffer_factor > 0 && !is_dense(o.method)) {
    const double k = static_cast<double>(o.choices), t = static_cast<double>(o.max_tokens);
    const double rows = o.method == ExchangeMethod::pair
                            ? k
                            : expected_groups(o.grid.ranks(), o.experts, o.choices);
    const auto planned = [&](double per_token, std::int64_t least) {
      return std::max(static_cast<std::int64_t>(std::ceil(o.buffer_factor * per_token * t)), least);
    };
    // A pass takes at least a row from every rank.
    b.rows = std::min(b.rows, of_chunk(planned(rows, o.grid.ranks())));
    // Rows are dealt out equally. Choices are not: any chunk may get all of them, as far as its rows can have so many.
    b.copies = std::min(o.chunks == 1 ? b.copies : b.rows * per_row,
                        planned(k, o.grid.ranks() * o.choices));
  }
  b.returned_rows = most_items(o.method, o.grid, o.max_tokens, o.choices, hops.size - 1);
  if (comes_in_steps(o))
    b.returned_rows += most_items(o.method, o.grid, o.max_tokens, o.choices, hops.size - 2);
  return b;
}

}  // namespace

const char* name(RowFormat format) noexcept {
  return format == RowFormat::fp8 ? "fp8" : "plain";
}

ExpertExchange::ExpertExchange(Communicator* group, const ExchangeOptions& options) {
  check_options(group, options);
  impl_ = std::make_unique<Impl>(group, options, bounds_of(options));
}
ExpertExchange::~ExpertExchange() = default;

const ExchangeOptions& ExpertExchange::options() const noexcept {
  return impl_->options;
}
const ExchangeBounds& ExpertExchange::bounds() const noexcept {
  return impl_->bounds;
}
const ExchangeStatistics& ExpertExchange::statistics() const noexcept {
  return impl_->statistics;
}

int ExpertExchange::chunks() const noexcept {
  return impl_->options.chunks;
}

bool ExpertExchange::may_take_passes() const noexcept {
  return impl_->limited();
}

ExchangePlan ExpertExchange::make_plan(Device device, const std::string& label) const {
  // A dry run, which has no group, needs no device: `plan` works on machines without one.
  if (impl_->group == nullptr) device = kCpu;
  auto plan = std::make_unique<ExchangePlan::Impl>(device, label);
  const auto bytes =
      static_cast<std::size_t>(impl_->counts_per_rank() * impl_->options.grid.ranks() * 4);
  if (bytes > 0) plan->host_counts = make_host_buffer(bytes, device, "exchange counts");
  return ExchangePlan(std::move(plan));
}

void ExpertExchange::begin_plan(
    ExchangePlan& plan, Backend& backend, TensorView memory, const Routing& routing, int passes) {
  Impl& self = *impl_;
  ExchangePlan::Impl& p = *plan.impl_;
  const std::int64_t tokens = routing.topk.dim(0);
  check_shape(routing.topk, {tokens, self.options.choices}, "topk");
  check_shape(routing.weights, routing.topk.shape(), "weights");
  check_dtype(routing.weights, self.options.weights, "weights");
  MOESAIC_CHECK(tokens <= self.options.max_tokens,
                fmt::format("{} tokens, at most {}", tokens, self.options.max_tokens));
  MOESAIC_CHECK(passes >= 1, "no pass");
  MOESAIC_CHECK(self.options.replicas == 0 || routing.place_of_expert.rank() == 2,
                "copies of experts need the turns of their tokens");
  const Impl::Measured measured(self, p, ExchangeWay::dispatch, backend);
  self.be_at(p, "plan", 0);
  p.routing = routing;
  p.tokens = tokens;
  p.passes = std::max(passes, self.options.chunks);
  p.finished = false;
  p.expert_rows.clear();
  self.lay_out(p, memory);
  PlanHop& first = p.hops[0];
  const std::int64_t rows = self.dense() ? self.options.max_tokens : tokens;
  run(backend,
      ExpertPlaces{.places = first.places.rows(0, rows),
                   .topk = routing.topk,
                   .kept = routing.kept,
                   .place_of_expert = routing.place_of_expert,
                   .experts = static_cast<std::int32_t>(self.options.experts)});
  self.sort_items(first, 0, rows, backend);
  if (!self.dense()) self.gather_counts(p, backend);
}

void ExpertExchange::finish_plan(ExchangePlan& plan, Backend& backend) {
  Impl& self = *impl_;
  ExchangePlan::Impl& p = *plan.impl_;
  MOESAIC_CHECK(!p.hops.empty() && !p.finished, "finish_plan() follows begin_plan()");
  const HopTable table = self.table_of(p, backend);
  const Impl::Measured measured(self, p, ExchangeWay::dispatch, backend);
  if (!self.dense()) {
    const bool per_choice = self.options.method == ExchangeMethod::pair;
    p.passes = passes_for(table,
                          self.bounds.rows,
                          self.bounds.copies,
                          per_choice ? 1 : self.options.choices,
                          p.passes);
    if (stream_of(backend).mode() == Stream::Mode::dry && self.limited())
      p.passes = std::max(self.options.chunks + 1, p.passes);
  }
  Arena& scratch = scratch_of(backend);
  for (std::size_t h = 0; h <= self.last(); ++h) {
    PlanHop& hop = p.hops[h];
    self.set_rows(hop, table, h);
    if (h == self.last()) break;
    const Arena::Mark mark(scratch);
    self.be_at(p, "plan", h);
    PlanHop& next = p.hops[h + 1];
    const ConstTensorView weights = h == 0 ? self.padded(backend, p.routing.weights) : hop.weights;
    self.send_choices(hop, h, backend, weights, pass_of(hop, 0, 1), next.places, next.weights);
    // A dry run has no rows, and must take the memory for all that can come.
    const bool dry = stream_of(backend).mode() == Stream::Mode::dry;
    const std::int64_t rows = dry ? next.places.dim(0) : hop.received;
    self.sort_items(next, h + 1, rows, backend);
  }
  if (self.in_steps(p, backend))
    set_steps(p.hops[self.last() - 1], table, self.options.grid, self.rank, p.passes);
  p.finished = true;
  ++self.statistics.plans;
  self.statistics.further_passes += p.passes - self.options.chunks;
}

void ExpertExchange::dispatch_choices(ExchangePlan& plan,
                                      Backend& backend,
                                      int pass,
                                      TensorView topk_rows,
                                      TensorView weights_rows,
                                      TensorView row_count) {
  Impl& self = *impl_;
  ExchangePlan::Impl& p = Impl::finished(plan);
  const std::int64_t rows = plan.rows(pass), k = self.options.choices;
  const Impl::Measured measured(self, p, ExchangeWay::dispatch, backend);
  check_shape(topk_rows, {self.bounds.rows, k}, "topk_rows");
  check_shape(weights_rows, {self.bounds.rows, k}, "weights_rows");
  const Arena::Mark mark(scratch_of(backend));
  self.be_at(p, "dispatch", self.last());
  const PlanHop& hop = p.hops[self.last()];
  const ConstTensorView weights =
      self.last() == 0 ? self.padded(backend, p.routing.weights) : hop.weights;
  self.send_choices(
      hop, self.last(), backend, weights, pass_of(hop, pass, p.passes), topk_rows, weights_rows);
  Stream& stream = stream_of(backend);
  if (rows < self.bounds.rows) {
    fill_bytes(topk_rows.rows(rows, self.bounds.rows), 0xff, stream);  // -1
    zero_tensor(weights_rows.rows(rows, self.bounds.rows), stream);
  }
  run(backend, Fill{.y = row_count, .value = static_cast<double>(rows)});
}

std::int64_t ExpertExchange::transit_bytes(std::int64_t width,
                                           DType dtype,
                                           RowFormat format) const {
  if (impl_->last() == 0 && format == RowFormat::plain) return 0;
  PlanMemory memory({});
  const std::size_t last = impl_->last();
  Impl::row_memory(memory, impl_->most(last), width, dtype, format);
  if (impl_->keeps_before(format))
    Impl::row_memory(memory, impl_->most(last - 1), width, dtype, format);
  return memory.bytes();
}

EnteredRows ExpertExchange::enter(
    ExchangePlan& plan, Backend& backend, TensorView memory, ConstTensorView x, RowFormat format) {
  Impl& self = *impl_;
  ExchangePlan::Impl& p = Impl::finished(plan);
  const std::int64_t width = x.dim(1);
  check_shape(x, {p.tokens, width}, "x");
  const Impl::Measured measured(self, p, ExchangeWay::dispatch, backend);
  EnteredRows at{.rows = x, .codes = {}, .scales = {}};
  if (self.last() == 0 && format == RowFormat::plain) return at;
  Arena& scratch = scratch_of(backend);
  const Arena::Mark mark(scratch);
  PlanMemory parts(memory);
  const std::size_t last = self.last();
  const auto memory_of = [&](auto& from, std::size_t h) {
    return Impl::row_memory(from, self.most(h), width, x.dtype(), format);
  };
  const Impl::RowMemory end = memory_of(parts, last);
  Impl::RowMemory before;
  if (self.keeps_before(format)) before = memory_of(parts, last - 1);
  const auto before_hop = [&](std::size_t h) {
    if (h == last) return end;
    return h + 1 == last && self.keeps_before(format) ? before : memory_of(scratch, h);
  };
  const bool in_steps = self.in_steps(p, backend);
  if (format == RowFormat::plain) {
    if (!in_steps || last > 1) at.rows = self.padded(backend, x);
  } else {
    const Impl::RowMemory start = before_hop(0);
    run(backend,
        QuantizeFp8Block{.scales = start.scales.rows(0, p.tokens),
                         .codes = start.codes.rows(0, p.tokens),
                         .x = x});
    at = start.entered();
  }
  const std::size_t to = in_steps ? last - 1 : last;
  for (std::size_t h = 0; h < to; ++h) {
    const Impl::RowMemory next = before_hop(h + 1);
    self.be_at(p, "dispatch", h);
    self.send_rows(p.hops[h], backend, pass_of(p.hops[h], 0, 1), at, next);
    at = next.entered();
  }
  if (in_steps) at.next = {end.rows, end.codes, end.scales};
  return at;
}

void ExpertExchange::dispatch(
    ExchangePlan& plan, Backend& backend, int pass, TensorView rows, const EnteredRows& from) {
  Impl& self = *impl_;
  ExchangePlan::Impl& p = Impl::finished(plan);
  const PlanHop& hop = p.hops[self.last()];
  const Transfer part = pass_of(hop, pass, p.passes);
  const Impl::Measured measured(self, p, ExchangeWay::dispatch, backend);
  Arena& scratch = scratch_of(backend);
  const Arena::Mark mark(scratch);
  EnteredRows at = from;
  if (from.goes_on()) {
    const Impl::RowMemory to{from.format, from.next.rows, from.next.codes, from.next.scales};
    self.step_across(p, backend, pass, from, to);
    at = to.entered();
  }
  self.be_at(p, "dispatch", self.last());
  if (at.format == RowFormat::plain) {
    check_shape(rows, {self.bounds.rows, at.rows.dim(1)}, "rows");
    check_dtype(rows, at.rows.dtype(), "rows");
    const ConstTensorView all = self.last() == 0 ? self.padded(backend, at.rows) : at.rows;
    return self.send_rows(hop, backend, part, {{rows, all, "rows"}});
  }
  check_shape(rows, {self.bounds.rows, at.codes.dim(1)}, "rows");
  const Impl::RowMemory landed =
      Impl::row_memory(scratch, self.bounds.rows, rows.dim(1), rows.dtype(), at.format);
  self.send_rows(hop, backend, part, at, landed);
  const std::int64_t came = plan.rows(pass);
  run(backend,
      DequantizeFp8Block{.y = rows.rows(0, came),
                         .codes = landed.codes.rows(0, came),
                         .scales = landed.scales.rows(0, came)});
}

void ExpertExchange::combine(
    ExchangePlan& plan, Backend& backend, int pass, TensorView returned, ConstTensorView rows) {
  Impl& self = *impl_;
  ExchangePlan::Impl& p = Impl::finished(plan);
  check_shape(rows, {self.bounds.rows, rows.dim(1)}, "rows");
  check_shape(returned, {self.bounds.returned_rows, rows.dim(1)}, "returned");
  check_dtype(returned, rows.dtype(), "returned");
  self.be_at(p, "combine", self.last());
  const Impl::Measured measured(self, p, ExchangeWay::combine, backend);
  self.send_back(
      backend, pass_of(p.hops[self.last()], pass, p.passes), self.returned_last(returned), rows);
  if (self.in_steps(p, backend)) self.step_back(p, backend, pass, returned);
}

void ExpertExchange::leave(ExchangePlan& plan,
                           Backend& backend,
                           TensorView out,
                           TensorView returned) {
  Impl& self = *impl_;
  ExchangePlan::Impl& p = Impl::finished(plan);
  check_shape(out, {p.tokens, returned.dim(1)}, "out");
  check_shape(returned, {self.bounds.returned_rows, returned.dim(1)}, "returned");
  Arena& scratch = scratch_of(backend);
  const Arena::Mark mark(scratch);
  const Impl::Measured measured(self, p, ExchangeWay::combine, backend);
  const std::int64_t width = returned.dim(1);
  const bool dry = stream_of(backend).mode() == Stream::Mode::dry;
  ConstTensorView came = self.returned_last(returned);
  for (std::size_t h = self.last(); h > 0; --h) {
    const bool across = h == self.last() && self.steps();
    const TensorView into =
        across
            ? self.returned_across(returned)
            : scratch.take({self.most_sent(h - 1), width}, returned.dtype(), "exchange.returned");
    // Sums of what came back in this hop go back one more, unless they did with the passes.
    if (!across || !self.in_steps(p, backend) || dry) {
      const TensorView sums =
          scratch.take({self.most(h), width}, returned.dtype(), "exchange.sums");
      self.add_up(p.hops[h], backend, sums.rows(0, p.hops[h - 1].received), came);
      self.be_at(p, "combine", h - 1);
      self.send_back(backend, pass_of(p.hops[h - 1], 0, 1), into, sums);
    }
    came = into;
  }
  self.add_up(p.hops[0], backend, out, came);
}

void ExpertExchange::dispatch(
    ExchangePlan& plan, Backend& backend, TensorView rows, ConstTensorView x, RowFormat format) {
  MOESAIC_CHECK(plan.passes() == 1, fmt::format("{} passes in one", plan.passes()));
  const Impl::Measured measured(*impl_, *plan.impl_, ExchangeWay::dispatch, backend);
  Arena& scratch = scratch_of(backend);
  const Arena::Mark mark(scratch);
  const TensorView memory =
      scratch.take({transit_bytes(x.dim(1), x.dtype(), format)}, DType::u8, "exchange.transit");
  const EnteredRows from = enter(plan, backend, memory, x, format);
  dispatch(plan, backend, 0, rows, from);
}

void ExpertExchange::combine(ExchangePlan& plan,
                             Backend& backend,
                             TensorView out,
                             ConstTensorView rows) {
  MOESAIC_CHECK(plan.passes() == 1, fmt::format("{} passes in one", plan.passes()));
  const Impl::Measured measured(*impl_, *plan.impl_, ExchangeWay::combine, backend);
  Arena& scratch = scratch_of(backend);
  const Arena::Mark mark(scratch);
  const TensorView returned =
      scratch.take({impl_->bounds.returned_rows, rows.dim(1)}, rows.dtype(), "exchange.returned");
  combine(plan, backend, 0, returned, rows);
  leave(plan, backend, out, returned);
}

Traffic ExpertExchange::traffic(const ExchangePlan& plan, std::int64_t row_bytes) const {
  Traffic sum;
  const ExchangePlan::Impl& p = Impl::finished(plan);
  for (const PlanHop& hop : p.hops) {
    for (int to = 0; to < impl_->options.grid.ranks(); ++to)
      sum.add(impl_->options.grid.link(impl_->rank, to),
              hop.send_rows[static_cast<std::size_t>(to)],
              row_bytes);
  }
  return sum;
}

}  // namespace moesaic
