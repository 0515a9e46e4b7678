#include "parallel/dispatch/exchange_impl.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "kernels/checks.h"
#include "kernels/ops/permute.h"

namespace moesaic {
namespace {

constexpr std::int64_t kScaleColumns = 128;  // of QuantizeFp8Block

// f(begin, end) for the items that a pass sends to others, neighbours together; own(begin, end, at) for those of this rank,
// which land at `at`.
template <class F, class Own>
void for_ranges(const Transfer& plan, int rank, const F& f, const Own& own) {
  std::int64_t begin = 0, end = 0;
  const auto flush = [&] {
    if (end > begin) f(begin, end);
    begin = end = 0;
  };
  auto landing = plan.receives.begin();
  for (const RowRun& run : plan.sends) {
    if (run.peer == rank) {
      landing = std::find_if(
          landing, plan.receives.end(), [&](const RowRun& r) { return r.peer == rank; });
      own(run.first, run.first + run.rows, landing++->first);
      continue;
    }
    if (run.first != end) {
      flush();
      begin = run.first;
    }
    end = run.first + run.rows;
  }
  flush();
}

}  // namespace

bool comes_in_steps(const ExchangeOptions& options) noexcept {
  return options.chunks > 1 && options.grid.nodes > 1 && fans_out(options.method);
}

ExpertExchange::Impl::Impl(Communicator* g, const ExchangeOptions& o, const ExchangeBounds& b)
    : group(g),
      options(o),
      hops(hops_of(o.method)),
      rank(g == nullptr ? 0 : g->rank()),
      places_per_rank(static_cast<std::int32_t>(o.experts / o.grid.ranks()) + o.replicas),
      bounds(b) {
  ExchangePlan::Impl measured(kCpu, "");
  bounds.plan_bytes = lay_out(measured, {});
}

std::int64_t ExpertExchange::Impl::counts_per_rank() const {
  return num_counts(options.method, options.grid) +
         (options.count_experts && !dense() ? options.experts : 0);
}

std::int64_t ExpertExchange::Impl::most(std::size_t hop) const {
  return most_rows(
      options.method, options.grid, options.max_tokens, options.choices, static_cast<int>(hop));
}
std::int64_t ExpertExchange::Impl::most_sent(std::size_t hop) const {
  return most_items(
      options.method, options.grid, options.max_tokens, options.choices, static_cast<int>(hop));
}

bool ExpertExchange::Impl::in_steps(const ExchangePlan::Impl& plan, Backend& backend) const {
  const bool dry = stream_of(backend).mode() == Stream::Mode::dry;
  return steps() && (plan.passes == options.chunks || dry);
}

std::int64_t ExpertExchange::Impl::most_runs() const {
  return 1 + (options.grid.nodes - 1) * slow_lots(options.method, options.grid);
}

bool ExpertExchange::Impl::limited() const {
  const std::int64_t rows = (most(last() + 1) + options.chunks - 1) / options.chunks;
  return bounds.rows < rows ||
         bounds.copies < rows * (options.method == ExchangeMethod::pair ? 1 : options.choices);
}

ExchangePlan::Impl& ExpertExchange::Impl::finished(const ExchangePlan& plan) {
  MOESAIC_CHECK(plan.impl_->finished, "a plan that is not finished");
  return *plan.impl_;
}

std::int64_t ExpertExchange::Impl::lay_out(ExchangePlan::Impl& plan, TensorView memory) const {
  PlanMemory m(memory);
  const std::int64_t k = options.choices, n = counts_per_rank();
  plan.hops.assign(last() + 1, {});
  for (std::size_t h = 0; h <= last(); ++h) {
    PlanHop& hop = plan.hops[h];
    hop.places = m.take({most(h), k}, DType::i32);
    if (h > 0) hop.weights = m.take({most(h), k}, options.weights);
    hop.index = m.take({most(h), k}, DType::i32);
    hop.to_item = m.take({most(h), k}, DType::i32);
    if (dense()) continue;
    hop.src = m.take({most_sent(h)}, DType::i32);
    hop.offsets = m.take({num_groups(hops.kind[h], places()) + 1}, DType::i32);
  }
  plan.counts = m.take({n}, DType::i32);
  plan.all_counts = m.take({options.grid.ranks(), n}, DType::i32);
  return m.bytes();
}

void ExpertExchange::Impl::sort_items(PlanHop& hop,
                                      std::size_t h,
                                      std::int64_t rows,
                                      Backend& backend) const {
  hop.rows = rows;
  for (TensorView* view : {&hop.places, &hop.index, &hop.to_item})
    *view = view->rows(0, rows);
  if (h > 0) hop.weights = hop.weights.rows(0, rows);
  Arena& scratch = scratch_of(backend);
  const Arena::Mark mark(scratch);
  const TensorView groups =
      dense() ? hop.to_item : scratch.take(hop.places.shape(), DType::i32, "exchange.groups");
  run(backend,
      ExchangeGroups{.groups = groups,
                     .index = hop.index,
                     .places = hop.places,
                     .grid = places(),
                     .kind = hops.kind[h],
                     .per_choice = options.method == ExchangeMethod::pair,
                     .stride = dense() ? rows : 0});
  if (dense()) return;
  run(backend,
      DispatchPlan{.offsets = hop.offsets,
                   .row_of_assignment = hop.to_item,
                   .token_of_row = hop.src,
                   .topk = groups,
                   .kept = {}});
}

void ExpertExchange::Impl::gather_counts(ExchangePlan::Impl& plan, Backend& backend) {
  const std::int64_t paths = num_counts(options.method, options.grid), all = plan.counts.dim(0);
  if (all > paths) {
    const PlaceGrid every_expert{1, static_cast<std::int32_t>(options.experts), 1, 0};
    run(backend,
        ExchangeCounts{.counts = plan.counts.rows(paths, all),
                       .places = plan.hops[0].places,
                       .grid = every_expert,
                       .hops = {},
                       .per_choice = true});
  }
  const int runs = token_runs(options.method, options.grid);
  const ConstTensorView tokens = plan.hops[0].places;
  const auto begin = [&](int i) {
    return run_begin(options.method, options.grid, tokens.dim(0), i);
  };
  for (int i = 0; i < runs; ++i) {
    run(backend,
        ExchangeCounts{.counts = plan.counts.rows(i * (paths / runs), (i + 1) * (paths / runs)),
                       .places = tokens.rows(begin(i), begin(i + 1)),
                       .grid = places(),
                       .hops = hops,
                       .per_choice = options.method == ExchangeMethod::pair});
  }
  Stream& stream = stream_of(backend);
  if (group == nullptr && options.grid.ranks() == 1) {
    copy_tensor(plan.all_counts.reshaped(plan.counts.shape()), plan.counts, stream);
  } else if (group != nullptr) {
    group->all_gather(plan.all_counts, plan.counts, stream);
    statistics.count_bytes +=
        static_cast<std::int64_t>(plan.counts.bytes()) * (options.grid.ranks() - 1);
  }
  if (verifies()) verify_counts(plan, backend);
  copy_tensor(plan.host_counts.view(plan.all_counts.shape(), DType::i32), plan.all_counts, stream);
  stream.record(plan.counted);
}

HopTable ExpertExchange::Impl::table_of(ExchangePlan::Impl& plan, Backend& backend) const {
  if (dense()) return dense_hop_table(options.method, options.grid, options.max_tokens);
  const std::int64_t each = num_counts(options.method, options.grid);
  std::vector<std::int32_t> paths;
  if (stream_of(backend).mode() == Stream::Mode::dry) {
    paths.assign(static_cast<std::size_t>(each * options.grid.ranks()), 0);
    return hop_table(options.method, options.grid, paths);
  }
  plan.counted.wait_on_host();
  const std::int64_t n = counts_per_rank();
  plan.expert_rows.assign(static_cast<std::size_t>(n > each ? places_per_rank : 0), 0);
  const auto* counts = reinterpret_cast<const std::int32_t*>(plan.host_counts.data());
  for (int from = 0; from < options.grid.ranks(); ++from, counts += n) {
    paths.insert(paths.end(), counts, counts + each);
    const std::int32_t* const here = counts + each + rank * places_per_rank;
    for (std::size_t i = 0; i < plan.expert_rows.size(); ++i)
      plan.expert_rows[i] += here[i];
  }
  return hop_table(options.method, options.grid, paths);
}

void ExpertExchange::Impl::set_rows(PlanHop& hop, const HopTable& table, std::size_t h) const {
  const int ranks = options.grid.ranks();
  hop.one_sender = fans_out(options.method) && h + 1 == last();
  hop.send_rows.assign(static_cast<std::size_t>(ranks), 0);
  hop.sent_to.assign(static_cast<std::size_t>(ranks), 0);
  hop.sends.clear();
  hop.receives.clear();
  hop.items = hop.received = 0;
  for (int p = 0; p < ranks; ++p) {
    const auto i = static_cast<std::size_t>(p);
    hop.send_rows[i] = table.at(h, rank, p);
    if (hop.send_rows[i] == 0) continue;
    const std::int64_t home = hop.items;
    // In the dense methods every peer gets all rows.
    const std::int64_t first = dense() ? 0 : home;
    std::int64_t sent = 0;
    for (const Arrival& a : arrivals_of(table, options.grid, h, p)) {
      if (a.from == rank) {
        hop.sends.push_back({.peer = p,
                             .part = a.part,
                             .rows = a.rows,
                             .earlier = hop.sent_to[i],
                             .first = first + sent,
                             .home = home + sent});
        sent += a.rows;
      }
      hop.sent_to[i] += a.rows;
    }
    MOESAIC_CHECK(sent == hop.send_rows[i], "lots are not the rows that are sent");
    hop.items += sent;
  }
  for (const Arrival& a : arrivals_of(table, options.grid, h, rank)) {
    hop.receives.push_back(
        {.peer = a.from, .part = a.part, .rows = a.rows, .earlier = hop.received});
    hop.received += a.rows;
  }
  MOESAIC_CHECK(
      hop.items <= most_sent(h) && hop.received <= most(h + 1),
      fmt::format(
          "{} rows to send and {} to receive are more than there can be", hop.items, hop.received));
}

void ExpertExchange::Impl::move(Backend& backend,
                                const std::vector<Piece>& pieces,
                                const Transfer& plan,
                                Traffic& traffic,
                                bool own_is_there) {
  Stream& stream = stream_of(backend);
  std::vector<OutgoingMessage> sends;
  std::vector<IncomingMessage> receives;
  std::vector<RowRun> own;
  std::int64_t row_bytes = 0;
  for (const Piece& piece : pieces)
    row_bytes += piece.in.dim(1) * static_cast<std::int64_t>(byte_size(piece.in.dtype()));
  for (const RowRun& run : plan.sends) {
    traffic.add(options.grid.link(rank, run.peer), run.rows, row_bytes);
    if (run.peer == rank) {
      own.push_back(run);
      continue;
    }
    for (const Piece& piece : pieces)
      sends.push_back({piece.in.rows(run.first, run.first + run.rows), run.peer});
  }
  auto next = own.begin();
  for (const RowRun& run : plan.receives) {
    const std::int64_t end = run.first + run.rows;
    if (run.peer != rank) {
      for (const Piece& piece : pieces)
        receives.push_back({piece.out.rows(run.first, end), run.peer});
      continue;
    }
    MOESAIC_CHECK(next != own.end() && next->rows == run.rows, "a rank sends itself other rows");
    for (const Piece& piece : pieces) {
      if (!own_is_there)
        copy_tensor(piece.out.rows(run.first, end),
                    piece.in.rows(next->first, next->first + run.rows),
                    stream);
    }
    ++next;
  }
  if (group != nullptr) group->exchange(sends, receives, stream);
  if (verifies()) verify(backend, pieces, plan);
}

void ExpertExchange::Impl::send_rows(const PlanHop& hop,
                                     Backend& backend,
                                     const Transfer& plan,
                                     const std::vector<Piece>& pieces) {
  if (dense()) return move(backend, pieces, plan, statistics.rows);
  Arena& scratch = scratch_of(backend);
  const Arena::Mark mark(scratch);
  std::vector<Piece> sent;
  for (const Piece& piece : pieces) {
    const ConstTensorView x = piece.in;
    const TensorView out = scratch.take({hop.src.dim(0), x.dim(1)}, x.dtype(), "exchange.send");
    const auto gather = [&](TensorView y, std::int64_t begin, std::int64_t end) {
      run(backend,
          GatherRows{.y = y, .x = x, .token_of_row = hop.src.rows(begin, end), .num_rows = {}});
    };
    for_ranges(
        plan,
        rank,
        [&](std::int64_t begin, std::int64_t end) { gather(out.rows(begin, end), begin, end); },
        [&](std::int64_t begin, std::int64_t end, std::int64_t at) {
          gather(piece.out.rows(at, at + end - begin), begin, end);
        });
    sent.push_back({piece.out, out, piece.what});
  }
  move(backend, sent, plan, statistics.rows, true);
}

namespace {
template <class Take>
ExpertExchange::Impl::RowMemory rows_from(
    const Take& take, std::int64_t rows, std::int64_t width, DType dtype, RowFormat format) {
  if (format == RowFormat::plain) return {format, take({rows, width}, dtype), {}, {}};
  const std::int64_t scales = (width + kScaleColumns - 1) / kScaleColumns;
  return {format, {}, take({rows, width}, DType::u8), take({rows, scales}, acc_dtype(dtype))};
}
}  // namespace

ExpertExchange::Impl::RowMemory ExpertExchange::Impl::row_memory(
    PlanMemory& memory, std::int64_t rows, std::int64_t width, DType dtype, RowFormat format) {
  return rows_from([&](Shape shape, DType type) { return memory.take(shape, type); },
                   rows,
                   width,
                   dtype,
                   format);
}
ExpertExchange::Impl::RowMemory ExpertExchange::Impl::row_memory(
    Arena& scratch, std::int64_t rows, std::int64_t width, DType dtype, RowFormat format) {
  return rows_from(
      [&](Shape shape, DType type) { return scratch.take(shape, type, "exchange.transit"); },
      rows,
      width,
      dtype,
      format);
}

void ExpertExchange::Impl::send_rows(const PlanHop& hop,
                                     Backend& backend,
                                     const Transfer& plan,
                                     const EnteredRows& from,
                                     const RowMemory& to) {
  if (from.format == RowFormat::plain)
    return send_rows(hop, backend, plan, {{to.rows, from.rows, "rows"}});
  send_rows(
      hop, backend, plan, {{to.codes, from.codes, "codes"}, {to.scales, from.scales, "scales"}});
}

void ExpertExchange::Impl::send_choices(const PlanHop& hop,
                                        std::size_t h,
                                        Backend& backend,
                                        ConstTensorView weights,
                                        const Transfer& plan,
                                        TensorView places_in,
                                        TensorView weights_in) {
  Arena& scratch = scratch_of(backend);
  const Arena::Mark mark(scratch);
  ExchangeChoices op{.places = hop.places,
                     .weights = weights,
                     .keep_begin = 0,
                     .keep_end = places().places(),
                     .places_per_owner = places_per_rank,
                     .localise = h == last()};
  const std::int64_t k = options.choices, out_rows = dense() ? places_in.dim(0) : hop.src.dim(0);
  const TensorView p = scratch.take({out_rows, k}, DType::i32, "exchange.places"),
                   w = scratch.take({out_rows, k}, options.weights, "exchange.weights");
  if (!dense()) {
    op.to_item = hop.to_item;
    op.index = hop.index;
    const auto take = [&](std::int64_t begin, std::int64_t end) {
      op.places_out = p.rows(begin, end);
      op.weights_out = w.rows(begin, end);
      op.src = hop.src.rows(begin, end);
      op.first = begin;
      run(backend, op);
    };
    for_ranges(plan, rank, take, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
      take(begin, end);
    });
    return move(
        backend, {{places_in, p, "places"}, {weights_in, w, "weights"}}, plan, statistics.choices);
  }
  // Everybody gets all choices and keeps those that pass through here.
  move(backend, {{p, hop.places, "places"}, {w, weights, "weights"}}, plan, statistics.choices);
  const std::int32_t width =
      h == last() ? places_per_rank : places_per_rank * options.grid.per_node;
  op.keep_begin = rank * places_per_rank / width * width;
  op.keep_end = op.keep_begin + width;
  const std::int64_t rows = plan.received();
  op.places = p.rows(0, rows);
  op.weights = w.rows(0, rows);
  op.places_out = places_in.rows(0, rows);
  op.weights_out = weights_in.rows(0, rows);
  run(backend, op);
}

void ExpertExchange::Impl::send_back(Backend& backend,
                                     const Transfer& there,
                                     TensorView returned,
                                     ConstTensorView rows) {
  move(backend, {{returned, rows, "rows"}}, there.reversed(), statistics.rows);
}

void ExpertExchange::Impl::step_across(const ExchangePlan::Impl& plan,
                                       Backend& backend,
                                       int pass,
                                       const EnteredRows& from,
                                       const RowMemory& to) {
  const Arena::Mark mark(scratch_of(backend));
  const std::size_t h = last() - 1;
  be_at(plan, "dispatch", h);
  EnteredRows all = from;
  if (h == 0 && from.format == RowFormat::plain) all.rows = padded(backend, from.rows);
  send_rows(plan.hops[h], backend, step_of(plan.hops[h], pass, &Lane::needed), all, to);
}

void ExpertExchange::Impl::step_back(const ExchangePlan::Impl& plan,
                                     Backend& backend,
                                     int pass,
                                     TensorView returned) {
  Arena& scratch = scratch_of(backend);
  const Arena::Mark mark(scratch);
  const std::size_t h = last() - 1;
  Transfer there = step_of(plan.hops[h], pass, &Lane::spent);
  const TensorView sums =
      scratch.take({most(last()), returned.dim(1)}, returned.dtype(), "exchange.sums");
  // Parts are spent in their order: their rows follow each other.
  const std::int64_t first = there.receives.empty() ? 0 : there.receives.front().first;
  add_up(
      plan.hops[last()], backend, sums.rows(0, there.received()), returned_last(returned), first);
  for (RowRun& run : there.receives)
    run.first -= first;
  be_at(plan, "combine", h);
  send_back(backend, there, returned_across(returned), sums);
}

void ExpertExchange::Impl::add_up(const PlanHop& hop,
                                  Backend& backend,
                                  TensorView sums,
                                  ConstTensorView returned,
                                  std::int64_t first) const {
  run(backend,
      CombineRows{.u = sums,
                  .y = returned,
                  .weights = {},
                  .row_of_assignment = hop.to_item.rows(first, first + sums.dim(0))});
}

ConstTensorView ExpertExchange::Impl::padded(Backend& backend, ConstTensorView x) const {
  if (!dense() || x.dim(0) == options.max_tokens) return x;
  const TensorView all =
      scratch_of(backend).take({options.max_tokens, x.dim(1)}, x.dtype(), "exchange.padded");
  copy_tensor(all.rows(0, x.dim(0)), x, stream_of(backend));
  return all;
}

}  // namespace moesaic
