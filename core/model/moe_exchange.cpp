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

// The choices of every chunk, which are kept like all choices; those of further passes come again when they are needed.
void MoeLayer::declare_arrival(TapeSpec& tape) {
  const std::int64_t rows = exchange_->bounds().rows, k = options_.top_k;
  a_.here.resize(static_cast<std::size_t>(exchange_->chunks()));
  std::vector<ActId> writes;
  for (Activations::Here& chunk : a_.here) {
    chunk.topk = tape.activation("moe.here_topk", {rows, k}, DType::i32);
    chunk.weights = tape.activation("moe.here_weights", {rows, k}, precision_.stats);
    chunk.count = tape.activation("moe.here_count", {1}, DType::i32);
    writes.insert(writes.end(), {chunk.topk, chunk.weights, chunk.count});
  }
  tape.step(
      "moe.exchange_choices",
      {a_.plan},
      writes,
      [this](Tape& p) {
        ExchangePlan& plan = plan_of(p);
        exchange_->finish_plan(plan, p.backend());
        expert_rows(p).set(plan.expert_rows());
        if (p.stream().mode() != Stream::Mode::dry)
          further_passes_ += plan.passes() - exchange_->chunks();
        Backend& way = exchange_->depart(p.backend());
        int pass = 0;
        for (const Activations::Here& chunk : a_.here)
          exchange_->dispatch_choices(
              plan, way, pass++, p.out(chunk.topk), p.out(chunk.weights), p.out(chunk.count));
      },
      StepKind::chooses);
}

void MoeLayer::declare_dispatch(TapeSpec& tape) {
  const ExchangeBounds& b = exchange_->bounds();
  const DType compute = precision_.compute;
  const bool is_one_pass = exchange_->chunks() == 1 && !exchange_->may_take_passes();
  std::vector<ActId> reads{a_.all_z, a_.plan}, writes;
  for (Activations::Here& chunk : a_.here)
    reads.push_back(chunk.count);
  // Further passes first: their memory is free again when the chunks take what they leave to backward.
  if (!is_one_pass) {
    a_.returned = tape.activation("moe.returned", {b.returned_rows, row_width()}, compute);
    tape.never_save(a_.returned);
    tape.step("moe.further_passes", reads, {a_.returned}, [this](Tape& p) {
      further_passes(p, p.out(a_.returned), p.in(a_.all_z));
    });
  }
  for (Activations::Here& chunk : a_.here) {
    chunk.z = tape.activation("moe.here_z", {b.rows, row_width()}, compute);
    writes.push_back(chunk.z);
  }
  tape.step("moe.exchange", reads, writes, [this, is_one_pass](Tape& p) {
    std::vector<TensorView> here_z;
    for (const Activations::Here& chunk : a_.here)
      here_z.push_back(p.out(chunk.z));
    ExchangePlan& plan = plan_of(p);
    const ConstTensorView z = p.in(a_.all_z);
    Backend& way = exchange_->depart(p.backend());
    if (is_one_pass) {
      exchange_->dispatch(plan, way, here_z[0], z, options_.rows);
      return exchange_->note(0);
    }
    const Arena::Mark mark(scratch_of(way));
    send_chunks(plan, way, here_z, enter(plan, way, scratch_of(way), z, options_.rows));
  });
}

// Every chunk sets out at once: the experts begin with the first while the others are under way.
void MoeLayer::send_chunks(ExchangePlan& plan,
                           Backend& way,
                           const std::vector<TensorView>& to,
                           const EnteredRows& from) const {
  for (int chunk = 0; chunk < exchange_->chunks(); ++chunk) {
    exchange_->dispatch(plan, way, chunk, to[static_cast<std::size_t>(chunk)], from);
    exchange_->note(chunk);
  }
}

// What the experts made of a chunk, and with several chunks its way back, beside the work at the next ones.
void MoeLayer::declare_way_back(TapeSpec& tape, std::size_t chunk) {
  Activations::Here& here = a_.here[chunk];
  here.u = tape.activation("moe.here_u", {tokens_here_, row_width()}, precision_.compute);
  tape.forward_only(here.u);
  tape.step(
      "moe.combine_here",
      {here.ye, here.weights, here.row_of_assignment},
      {here.u},
      [this, chunk](Tape& p) {
        const Activations::Here& h = a_.here[chunk];
        combine_here(p, p.out(h.u), p.in(h.ye), sorted_rows(p, chunk));
      },
      StepKind::cheap);
  if (a_.here.size() == 1) return;
  // Holds nothing: it stands for the rows in a_.returned, which one step alone can declare.
  here.sent = tape.activation("moe.sent_back", {1}, DType::u8);
  tape.never_save(here.sent);
  tape.step("moe.send_back", {here.u, a_.plan, a_.returned}, {here.sent}, [this, chunk](Tape& p) {
    const Activations::Here& h = a_.here[chunk];
    p.out(h.sent);
    exchange_->combine(plan_of(p),
                       exchange_->depart(p.backend()),
                       static_cast<int>(chunk),
                       p.out(a_.returned),
                       p.in(h.u));
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
  if (!a_.returned.valid()) {
    return exchange_->combine(plan, tape.backend(), u, tape.in(a_.here[0].u));
  }
  tape.in(a_.returned);  // from further passes; a replay makes it
  const TensorView returned = tape.out(a_.returned);
  if (a_.here.size() == 1) {
    exchange_->combine(plan, tape.backend(), 0, returned, tape.in(a_.here[0].u));
  } else {
    exchange_->arrive(plan, ExchangeWay::combine, tape.backend());
  }
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
  if (plan.passes() == exchange_->chunks()) return;
  const Tape::Scope scope(tape);
  const PassMemory memory =
      pass_memory(tape, tape.temp({copies_here_, row_width()}, precision_.compute, "moe.pass_xs"));
  const TensorView rows =
                       tape.temp({tokens_here_, row_width()}, precision_.compute, "moe.pass_rows"),
                   h = tape.temp({copies_here_, options_.inner}, precision_.compute, "moe.pass_h"),
                   ye = memory.xs;  // spent once h is there
  const EnteredRows z = enter(plan, tape.backend(), tape.context().transient, all_z, options_.rows);
  for (int pass = exchange_->chunks(); pass < plan.passes(); ++pass) {
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
  const bool has_further = plan_of(tape).passes() > exchange_->chunks();
  std::vector<ChunkBackward> chunks;
  for (std::size_t c = 0; c < a_.here.size(); ++c)
    chunks.push_back({sorted_rows(tape, c), expert_inputs(tape, c), {}, {}, {}});
  const ConstTensorView all_z = has_further ? tape.in(a_.all_z) : ConstTensorView();
  const Tape::Scope scope(tape);
  const DType compute = precision_.compute, stats = precision_.stats;
  const std::int64_t l = row_width(), k = options_.top_k;
  for (ChunkBackward& chunk : chunks) {
    chunk.du = tape.temp({tokens_here_, l}, compute, "d moe.here_u");
    chunk.dz = tape.temp({tokens_here_, l}, compute, "d moe.here_z");
    chunk.dweights = tape.temp({tokens_here_, k}, stats, "d moe.here_weights");
  }
  if (a_.returned.valid()) return backward_passes(tape, chunks, all_z, du, dz, dweights);
  backward_once(tape, chunks[0], du, dz, dweights);
}

void MoeLayer::backward_once(
    Tape& tape, const ChunkBackward& only, ConstTensorView du, TensorView dz, TensorView dweights) {
  ExchangePlan& plan = plan_of(tape);
  exchange_->dispatch(plan, tape.backend(), only.du, du, options_.gradient_rows);
  // The way back beside the larger of the weight gradients.
  backward_here(tape, only.sorted, only.inputs, only.du, only.dz, only.dweights, [&] {
    Backend& way = exchange_->depart(tape.backend());
    exchange_->combine(plan, way, dz, only.dz);
    exchange_->combine(plan, way, dweights, only.dweights);
  });
  exchange_->arrive(plan, ExchangeWay::combine, tape.backend());
}

void MoeLayer::backward_passes(Tape& tape,
                               const std::vector<ChunkBackward>& chunks,
                               ConstTensorView all_z,
                               ConstTensorView du,
                               TensorView dz,
                               TensorView dweights) {
  ExchangePlan& plan = plan_of(tape);
  Backend& main = tape.backend();
  const std::int64_t items = exchange_->bounds().returned_rows;
  const TensorView returned = tape.temp({items, row_width()}, precision_.compute, "d moe.returned"),
                   returned_weights = tape.temp(
                       {items, options_.top_k}, precision_.stats, "d moe.returned_weights");
  Arena& memory = tape.context().transient;
  Backend& ahead = exchange_->depart(main);
  const EnteredRows from = enter(plan, ahead, memory, du, options_.gradient_rows);
  std::vector<TensorView> here_du;
  for (const ChunkBackward& chunk : chunks)
    here_du.push_back(chunk.du);
  send_chunks(plan, ahead, here_du, from);
  // The way back beside the rest of the backward pass; after the last one, the way home too.
  const auto pass_back = [&](int pass, const ChunkBackward& at) {
    backward_here(tape, at.sorted, at.inputs, at.du, at.dz, at.dweights, [&] {
      Backend& way = exchange_->depart(main);
      exchange_->combine(plan, way, pass, returned, at.dz);
      exchange_->combine(plan, way, pass, returned_weights, at.dweights);
      if (pass + 1 < plan.passes()) return;
      exchange_->leave(plan, way, dz, returned);
      exchange_->leave(plan, way, dweights, returned_weights);
    });
  };
  for (std::size_t c = 0; c < chunks.size(); ++c) {
    arrive(tape, c);
    pass_back(static_cast<int>(c), chunks[c]);
  }
  exchange_->arrive(plan, ExchangeWay::combine, main);
  if (plan.passes() == exchange_->chunks()) return;
  MOESAIC_CHECK(tape.context().weight_gradients.mode() == WeightGradients::Mode::at_once,
                "weight gradients of a pass cannot wait: the next one takes its memory");
  // What the first chunk kept is spent; its largest parts are written anew.
  ChunkBackward again = chunks[0];
  const PassMemory kept = pass_memory(tape, tape.reuse(a_.here[0].xs));
  const TensorView gate_up = tape.reuse(a_.here[0].gate_up);
  const EnteredRows z = enter(plan, main, memory, all_z, options_.rows);
  again.inputs = {.xs = kept.xs, .gate_up = gate_up};
  for (int pass = exchange_->chunks(); pass < plan.passes(); ++pass) {
    again.sorted = bring(tape, pass, kept, again.dz, z);
    gate_and_activate(tape, {}, gate_up, kept.xs, again.sorted.offsets);
    exchange_->dispatch(plan, main, pass, again.du, from);
    pass_back(pass, again);
    exchange_->arrive(plan, ExchangeWay::combine, main);
  }
}

}  // namespace moesaic
