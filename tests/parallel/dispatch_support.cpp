#include "tests/parallel/dispatch_support.h"

namespace moesaic::test {
namespace {

ExchangeOptions options_of(const ExchangeCase& c, ExchangeMethod method, DType stats) {
  return {.method = method,
          .grid = c.grid,
          .experts = c.experts(),
          .replicas = c.replicas,
          .choices = c.choices,
          .max_tokens = c.max_tokens(),
          .weights = stats,
          .buffer_factor = c.buffer_factor,
          .chunks = c.chunks,
          .count_experts = c.count_experts,
          .verify = c.verify};
}
DType stats_of(DType compute) {
  return compute == DType::f64 ? DType::f64 : DType::f32;
}

}  // namespace

ExchangeRun::ExchangeRun(Communicator* group,
                         const ExchangeCase& c,
                         ExchangeMethod method,
                         DType compute,
                         Stream::Mode mode)
    : c_(c),
      compute_(compute),
      stats_(stats_of(compute)),
      rank_(group == nullptr ? 0 : group->rank()),
      copies_(copies_of(c)),
      exchange_(group, options_of(c, method, stats_)),
      owner_(
          {.mode = mode, .num_threads = 1, .scratch_bytes = std::size_t{1} << 20, .name = "test"}),
      topk_rows_({exchange_.bounds().rows, c.choices}, DType::i32),
      weights_rows_({exchange_.bounds().rows, c.choices}, stats_),
      row_count_({1}, DType::i32),
      rows_({exchange_.bounds().rows, c.width}, compute),
      drows_({exchange_.bounds().rows, c.width}, compute),
      partial_({exchange_.bounds().rows, c.width}, compute),
      offsets_({copies_.places_per_rank() + 1}, DType::i32),
      map_({exchange_.bounds().rows, c.choices}, DType::i32),
      token_of_row_({exchange_.bounds().copies}, DType::i32),
      xs_({exchange_.bounds().copies, c.width}, compute),
      ye_({exchange_.bounds().copies, c.width}, compute),
      dweights_rows_({exchange_.bounds().rows, c.choices}, stats_) {}

// Everything so far is done, and temporaries hold NaN: nobody may still need them.
void ExchangeRun::settle() {
  owner_.stream().synchronize();
  owner_.scratch().poison();
}

// partial_ = sum over a row's experts here of weight x expert(row).
void ExchangeRun::experts_forward() {
  Backend& b = owner_.backend();
  moesaic::run(b,
               DispatchPlan{.offsets = offsets_,
                            .row_of_assignment = map_,
                            .token_of_row = token_of_row_,
                            .topk = topk_rows_,
                            .kept = {},
                            .token_count = row_count_});
  moesaic::run(b, dispatch_rows(xs_, rows_, token_of_row_, offsets_));
  settle();
  for (std::int32_t e = 0; e < copies_.places_per_rank(); ++e) {
    for (auto row = static_cast<std::int64_t>(offsets_.at(e));
         row < static_cast<std::int64_t>(offsets_.at(e + 1));
         ++row) {
      for (std::int64_t col = 0; col < c_.width; ++col) {
        const double x = xs_.at(row * c_.width + col);
        ye_.set(row * c_.width + col, factor(e, col) * x * x);
      }
    }
  }
  CombineRows sum = combine_rows(partial_, ye_, weights_rows_, map_);
  sum.token_count = row_count_;
  moesaic::run(b, sum);
}

// From the gradient of partial_ in drows_: partial_ = the gradient of the rows, dweights_rows_ that of the weights.
void ExchangeRun::experts_backward() {
  Backend& b = owner_.backend();
  settle();
  const auto copies = exchange_.bounds().copies;
  const Field dys({copies, c_.width}, compute_), dxs({copies, c_.width}, compute_),
      row_weight({copies}, stats_), drow_weight({copies}, stats_);
  moesaic::run(b, combine_rows_backward(dys, drows_, token_of_row_, offsets_));
  moesaic::run(b,
               RowWeightForward{
                   .row_weight = row_weight, .weights = weights_rows_, .row_of_assignment = map_});
  settle();
  for (std::int32_t e = 0; e < copies_.places_per_rank(); ++e) {
    for (auto row = static_cast<std::int64_t>(offsets_.at(e));
         row < static_cast<std::int64_t>(offsets_.at(e + 1));
         ++row) {
      double dw = 0;
      for (std::int64_t col = 0; col < c_.width; ++col) {
        const std::int64_t i = row * c_.width + col;
        const double f = factor(e, col), x = xs_.at(i), g = dys.at(i);
        dw += f * x * x * g;
        dxs.set(i, row_weight.at(row) * 2 * f * x * g);
      }
      drow_weight.set(row, dw);
    }
  }
  moesaic::run(
      b,
      RowWeightBackward{
          .dweights = dweights_rows_, .drow_weight = drow_weight, .row_of_assignment = map_});
  CombineRows sum = dispatch_rows_backward(partial_, dxs, map_);
  sum.token_count = row_count_;
  moesaic::run(b, sum);
  settle();
}

RankRun ExchangeRun::run(const RankTokens& tokens) {
  const auto n = static_cast<std::int64_t>(tokens.topk.size()) / c_.choices;
  const ExchangeBounds& bounds = exchange_.bounds();
  Backend& b = owner_.backend();
  const Field topk({n, c_.choices}, DType::i32, tokens.topk),
      kept({n, c_.choices}, DType::u8, tokens.kept),
      weights({n, c_.choices}, stats_, tokens.weights), x({n, c_.width}, compute_, tokens.x),
      dout({n, c_.width}, compute_, tokens.dout),
      table({c_.experts()}, DType::i32, places_of_experts(c_)),
      turns({c_.experts(), kReplicaTurns}, DType::i32, copies_.place_of_turn),
      memory({bounds.plan_bytes}, DType::u8), out({n, c_.width}, compute_),
      dx({n, c_.width}, compute_), dweights({n, c_.choices}, stats_),
      transit({exchange_.transit_bytes(c_.width, compute_, c_.format)}, DType::u8),
      returned({bounds.returned_rows, c_.width}, compute_),
      returned_weights({bounds.returned_rows, c_.choices}, stats_);
  ExchangePlan plan = exchange_.make_plan(kCpu, "layer 7");
  settle();
  exchange_.begin_plan(plan,
                       b,
                       memory,
                       {.topk = topk,
                        .weights = weights,
                        .kept = c_.drop > 0 ? kept.view() : TensorView(),
                        .place_of_expert = c_.replicas > 0 ? turns.view()
                                           : c_.permuted   ? table.view()
                                                           : TensorView()},
                       c_.passes);
  settle();
  exchange_.finish_plan(plan, b);
  RankRun result;
  result.passes = plan.passes();
  result.expert_rows.assign(plan.expert_rows().begin(), plan.expert_rows().end());
  result.traffic = exchange_.traffic(plan, 1);
  settle();
  // Forward. With one pass through the calls for one pass.
  const bool one = plan.passes() == 1;
  const EnteredRows entered = one ? EnteredRows{} : exchange_.enter(plan, b, transit, x, c_.format);
  for (int pass = 0; pass < plan.passes(); ++pass) {
    settle();
    exchange_.dispatch_choices(plan, b, pass, topk_rows_, weights_rows_, row_count_);
    settle();
    if (one) {
      exchange_.dispatch(plan, b, rows_, x, c_.format);
    } else {
      exchange_.dispatch(plan, b, pass, rows_, entered);
    }
    settle();
    for (std::int64_t row = 0; row < plan.rows(pass); ++row) {
      std::vector<std::int32_t> places;
      for (std::int64_t j = 0; j < c_.choices; ++j)
        places.push_back(static_cast<std::int32_t>(topk_rows_.at(row * c_.choices + j)));
      result.places.push_back(places);
      result.first_column.push_back(rows_.at(row * c_.width));
    }
    experts_forward();
    if (!one) exchange_.combine(plan, b, pass, returned, partial_);
  }
  if (one) {
    exchange_.combine(plan, b, out, partial_);
  } else {
    exchange_.leave(plan, b, out, returned);
  }
  settle();
  // Backward; with several passes their forward is computed again.
  const Field transit_dout({exchange_.transit_bytes(c_.width, compute_, RowFormat::plain)},
                           DType::u8);
  const EnteredRows entered_dout =
      one ? EnteredRows{} : exchange_.enter(plan, b, transit_dout, dout);
  for (int pass = 0; pass < plan.passes(); ++pass) {
    if (!one) {
      exchange_.dispatch_choices(plan, b, pass, topk_rows_, weights_rows_, row_count_);
      exchange_.dispatch(plan, b, pass, rows_, entered);
      experts_forward();
      exchange_.dispatch(plan, b, pass, drows_, entered_dout);
    } else {
      exchange_.dispatch(plan, b, drows_, dout);
    }
    experts_backward();
    if (!one) {
      exchange_.combine(plan, b, pass, returned, partial_);
      exchange_.combine(plan, b, pass, returned_weights, dweights_rows_);
    }
  }
  if (one) {
    exchange_.combine(plan, b, dx, partial_);
    exchange_.combine(plan, b, dweights, dweights_rows_);
  } else {
    exchange_.leave(plan, b, dx, returned);
    exchange_.leave(plan, b, dweights, returned_weights);
  }
  owner_.stream().synchronize();
  result.result = {out.values(), dx.values(), dweights.values()};
  result.statistics = exchange_.statistics();
  return result;
}

std::vector<RankRun> run_exchange(const ExchangeCase& c,
                                  ExchangeMethod method,
                                  DType compute,
                                  Stream::Mode mode) {
  const auto tokens = draw_tokens(c);
  std::vector<RankRun> results(tokens.size());
  run_local_ranks(c.grid.ranks(), [&](Communicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    ExchangeRun run(&comm, c, method, compute, mode);
    results[rank] = run.run(tokens[rank]);
  });
  return results;
}

}  // namespace moesaic::test
