// The way of a mixture's tokens to experts on other ranks and back, in one pass or, with small buffers, in several.
#include "core/model/moe.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/permute.h"

namespace moesaic {

// Choices leave here; what they bring is waited for in declare_arrival(), behind what is computed meanwhile.
void MoeLayer::declare_departure(TapeSpec& tape) {
  const ExchangeBounds& b = exchange_->bounds();
  tokens_here_ = b.rows;
  copies_here_ = b.copies;
  plan_ = tape.host_value([this] {
    return std::make_shared<ExchangePlan>(exchange_->make_plan(params_.device(), name()));
  });
  a_.plan = tape.activation("moe.exchange_plan", {b.plan_bytes}, DType::u8);
  std::vector<ActId> reads{a_.all_topk, a_.all_weights};
  if (a_.all_kept.valid()) reads.push_back(a_.all_kept);
  tape.step(
      "moe.exchange_plan",
      reads,
      {a_.plan},
      [this](Tape& p) {
        exchange_->begin_plan(plan_of(p),
                              p.backend(),
                              p.out(a_.plan),
                              {.topk = p.in(a_.all_topk),
                               .weights = p.in(a_.all_weights),
                               .kept = a_.all_kept.valid() ? p.in(a_.all_kept) : ConstTensorView(),
                               .place_of_expert = params_.place_of_member(places_)});
      },
      StepKind::chooses);
}

// The choices of the first pass, which are kept like all choices; those of further passes come again when they are needed.
void MoeLayer::declare_arrival(TapeSpec& tape) {
  const std::int64_t rows = exchange_->bounds().rows, k = options_.top_k;
  a_.here_topk = tape.activation("moe.here_topk", {rows, k}, DType::i32);
  a_.here_weights = tape.activation("moe.here_weights", {rows, k}, precision_.stats);
  a_.here_count = tape.activation("moe.here_count", {1}, DType::i32);
  tape.step(
      "moe.exchange_choices",
      {a_.plan},
      {a_.here_topk, a_.here_weights, a_.here_count},
      [this](Tape& p) {
        exchange_->finish_plan(plan_of(p), p.backend());
        if (p.stream().mode() != Stream::Mode::dry) further_passes_ += plan_of(p).passes() - 1;
        exchange_->dispatch_choices(plan_of(p),
                                    exchange_->depart(p.backend()),
                                    0,
                                    p.out(a_.here_topk),
                                    p.out(a_.here_weights),
                                    p.out(a_.here_count));
      },
      StepKind::chooses);
}

void MoeLayer::declare_dispatch(TapeSpec& tape) {
  const ExchangeBounds& b = exchange_->bounds();
  const DType compute = precision_.compute;
  // Further passes first: their memory is free again when the first one takes what it leaves to backward.
  if (exchange_->may_take_passes()) {
    a_.returned = tape.activation("moe.returned", {b.returned_rows, row_width()}, compute);
    tape.never_save(a_.returned);
    tape.step(
        "moe.further_passes", {a_.all_z, a_.plan, a_.here_count}, {a_.returned}, [this](Tape& p) {
          further_passes(p, p.out(a_.returned), p.in(a_.all_z));
        });
  }
  a_.here_z = tape.activation("moe.here_z", {b.rows, row_width()}, compute);
  tape.step("moe.exchange", {a_.all_z, a_.plan, a_.here_count}, {a_.here_z}, [this](Tape& p) {
    const TensorView here_z = p.out(a_.here_z);
    const ConstTensorView z = p.in(a_.all_z);
    Backend& way = exchange_->depart(p.backend());
    if (!exchange_->may_take_passes())
      return exchange_->dispatch(plan_of(p), way, here_z, z, options_.rows);
    const Arena::Mark mark(scratch_of(way));
    exchange_->dispatch(
        plan_of(p), way, 0, here_z, enter(plan_of(p), way, scratch_of(way), z, options_.rows));
  });
}

EnteredRows MoeLayer::enter(
    ExchangePlan& plan, Backend& way, Arena& memory, ConstTensorView rows, RowFormat format) const {
  const TensorView transit =
      memory.take({exchange_->transit_bytes(rows.dim(1), rows.dtype(), format)},
                  DType::u8,
                  "moe.exchange_transit");
  return exchange_->enter(plan, way, transit, rows, format);
}

// Where the parts of u that came back in all passes are added up.
void MoeLayer::combine_exchanged(Tape& tape, TensorView u) {
  ExchangePlan& plan = plan_of(tape);
  const ConstTensorView here_u = tape.in(a_.here_u);
  if (!a_.returned.valid()) return exchange_->combine(plan, tape.backend(), u, here_u);
  tape.in(a_.returned);  // from further passes; a replay makes it
  const TensorView returned = tape.out(a_.returned);
  exchange_->combine(plan, tape.backend(), 0, returned, here_u);
  exchange_->leave(plan, tape.backend(), u, returned);
}

MoeLayer::PassMemory MoeLayer::pass_memory(Tape& tape, TensorView xs) const {
  const std::int64_t k = options_.top_k;
  return {.topk = tape.temp({tokens_here_, k}, DType::i32, "moe.pass_topk"),
          .weights = tape.temp({tokens_here_, k}, precision_.stats, "moe.pass_weights"),
          .count = tape.temp({1}, DType::i32, "moe.pass_count"),
          .offsets = tape.temp({experts_here() + 1}, DType::i32, "moe.pass_offsets"),
          .row_of_assignment = tape.temp({tokens_here_, k}, DType::i32, "moe.pass_plan"),
          .token_of_row = tape.temp({copies_here_}, DType::i32, "moe.pass_tokens"),
          .xs = xs};
}

// The rows of a pass and what came with them, sorted by expert. `landing` [rows, width] is only passed through.
MoeLayer::SortedRows MoeLayer::bring(
    Tape& tape, int pass, const PassMemory& to, TensorView landing, const EnteredRows& z) const {
  ExchangePlan& plan = plan_of(tape);
  exchange_->dispatch_choices(plan, tape.backend(), pass, to.topk, to.weights, to.count);
  exchange_->dispatch(plan, tape.backend(), pass, landing, z);
  tape.run(DispatchPlan{.offsets = to.offsets,
                        .row_of_assignment = to.row_of_assignment,
                        .token_of_row = to.token_of_row,
                        .topk = to.topk,
                        .kept = {},
                        .token_count = to.count});
  tape.run(dispatch_rows(to.xs, landing, to.token_of_row, to.offsets));
  return {.weights = to.weights,
          .count = to.count,
          .offsets = to.offsets,
          .row_of_assignment = to.row_of_assignment,
          .token_of_row = to.token_of_row};
}

void MoeLayer::further_passes(Tape& tape, TensorView returned, ConstTensorView all_z) const {
  ExchangePlan& plan = plan_of(tape);
  if (plan.passes() == 1) return;
  const Tape::Scope scope(tape);
  const PassMemory memory =
      pass_memory(tape, tape.temp({copies_here_, row_width()}, precision_.compute, "moe.pass_xs"));
  const TensorView rows =
                       tape.temp({tokens_here_, row_width()}, precision_.compute, "moe.pass_rows"),
                   h = tape.temp({copies_here_, options_.inner}, precision_.compute, "moe.pass_h"),
                   ye = memory.xs;  // spent once h is there
  const EnteredRows z = enter(plan, tape.backend(), tape.context().transient, all_z, options_.rows);
  for (int pass = 1; pass < plan.passes(); ++pass) {
    const SortedRows sorted = bring(tape, pass, memory, rows, z);
    gate_and_activate(tape, h, {}, memory.xs, sorted.offsets);
    down(tape, ye, h, sorted.offsets);
    combine_here(tape, rows, ye, sorted);
    exchange_->combine(plan, tape.backend(), pass, returned, rows);
  }
}

void MoeLayer::backward_exchange(Tape& tape,
                                 ConstTensorView du,
                                 TensorView dz,
                                 TensorView dweights) {
  tape.in(a_.plan);
  ExchangePlan& plan = plan_of(tape);
  const SortedRows sorted = sorted_rows(tape);
  const ExpertInputs inputs{.xs = tape.in(a_.xs), .gate_up = tape.in(a_.gate_up)};
  const ConstTensorView all_z = plan.passes() > 1 ? tape.in(a_.all_z) : ConstTensorView();
  const Tape::Scope scope(tape);
  const DType compute = precision_.compute, stats = precision_.stats;
  const std::int64_t l = row_width(), k = options_.top_k;
  const ArrivedGradients here{tape.temp({tokens_here_, l}, compute, "d moe.here_u"),
                              tape.temp({tokens_here_, l}, compute, "d moe.here_z"),
                              tape.temp({tokens_here_, k}, stats, "d moe.here_weights")};
  if (exchange_->may_take_passes())
    return backward_passes(tape, {sorted, inputs, all_z}, here, du, dz, dweights);
  exchange_->dispatch(plan, tape.backend(), here.du, du, options_.gradient_rows);
  // The way back beside the larger of the weight gradients.
  backward_here(tape, sorted, inputs, here.du, here.dz, here.dweights, [&] {
    Backend& way = exchange_->depart(tape.backend());
    exchange_->combine(plan, way, dz, here.dz);
    exchange_->combine(plan, way, dweights, here.dweights);
  });
  arrive(tape, ExchangeWay::combine);
}

void MoeLayer::backward_passes(Tape& tape,
                               const FirstPass& first,
                               const ArrivedGradients& here,
                               ConstTensorView du,
                               TensorView dz,
                               TensorView dweights) {
  ExchangePlan& plan = plan_of(tape);
  const std::int64_t items = exchange_->bounds().returned_rows;
  const TensorView returned = tape.temp({items, row_width()}, precision_.compute, "d moe.returned"),
                   returned_weights = tape.temp(
                       {items, options_.top_k}, precision_.stats, "d moe.returned_weights");
  Arena& memory = tape.context().transient;
  const EnteredRows from = enter(plan, tape.backend(), memory, du, options_.gradient_rows);
  const auto pass_back = [&](int pass, const SortedRows& rows, const ExpertInputs& inputs) {
    exchange_->dispatch(plan, tape.backend(), pass, here.du, from);
    backward_here(tape, rows, inputs, here.du, here.dz, here.dweights, [&] {
      Backend& way = exchange_->depart(tape.backend());
      exchange_->combine(plan, way, pass, returned, here.dz);
      exchange_->combine(plan, way, pass, returned_weights, here.dweights);
    });
    arrive(tape, ExchangeWay::combine);
  };
  pass_back(0, first.sorted, first.inputs);
  if (plan.passes() > 1) {
    MOESAIC_CHECK(tape.context().weight_gradients.mode() == WeightGradients::Mode::at_once,
                  "weight gradients of a pass cannot wait: the next one takes its memory");
    // What the first pass kept is spent; its largest parts are written anew.
    const PassMemory kept = pass_memory(tape, tape.reuse(a_.xs));
    const TensorView gate_up = tape.reuse(a_.gate_up);
    const EnteredRows z = enter(plan, tape.backend(), memory, first.all_z, options_.rows);
    for (int pass = 1; pass < plan.passes(); ++pass) {
      const SortedRows rows = bring(tape, pass, kept, here.dz, z);
      gate_and_activate(tape, {}, gate_up, kept.xs, rows.offsets);
      pass_back(pass, rows, {.xs = kept.xs, .gate_up = gate_up});
    }
  }
  exchange_->leave(plan, tape.backend(), dz, returned);
  exchange_->leave(plan, tape.backend(), dweights, returned_weights);
}

}  // namespace moesaic
