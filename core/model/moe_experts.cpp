// The experts of this rank: rows sorted by expert, the grouped products, sums over a token's rows, and their backward.
#include "core/model/moe.h"
#include "kernels/checks.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/grouped_gemm.h"
#include "kernels/ops/grouped_glu.h"
#include "kernels/ops/permute.h"
#include "kernels/ops/quant.h"

namespace moesaic {

MoeLayer::SortedRows MoeLayer::sorted_rows(Tape& tape, std::size_t chunk) const {
  const Activations::Here& here = a_.here[chunk];
  return {.weights = tape.in(here.weights),
          .count = here.count.valid() ? tape.in(here.count) : ConstTensorView(),
          .offsets = tape.in(here.offsets),
          .row_of_assignment = tape.in(here.row_of_assignment),
          .token_of_row = tape.in(here.token_of_row)};
}

MoeLayer::ExpertInputs MoeLayer::expert_inputs(Tape& tape, std::size_t chunk) const {
  return {.xs = tape.in(a_.here[chunk].xs), .gate_up = tape.in(a_.here[chunk].gate_up)};
}

void MoeLayer::declare_sort(TapeSpec& tape, std::size_t chunk) {
  Activations::Here& here = a_.here[chunk];
  here.offsets = tape.activation("moe.offsets", {experts_here() + 1}, DType::i32);
  here.row_of_assignment =
      tape.activation("moe.row_of_assignment", {tokens_here_, options_.top_k}, DType::i32);
  here.token_of_row = tape.activation("moe.token_of_row", {copies_here_}, DType::i32);
  std::vector<ActId> reads{here.topk};
  // What was dropped does not travel.
  const bool drops = a_.all_kept.valid() && exchange_ == nullptr;
  if (drops) reads.push_back(a_.all_kept);
  if (here.count.valid()) reads.push_back(here.count);
  tape.step(
      "moe.plan",
      reads,
      {here.offsets, here.row_of_assignment, here.token_of_row},
      [this, drops, chunk](Tape& p) {
        const Activations::Here& h = a_.here[chunk];
        arrive(p, chunk);
        p.run(DispatchPlan{.offsets = p.out(h.offsets),
                           .row_of_assignment = p.out(h.row_of_assignment),
                           .token_of_row = p.out(h.token_of_row),
                           .topk = p.in(h.topk),
                           .kept = drops ? p.in(a_.all_kept) : ConstTensorView(),
                           .token_count = h.count.valid() ? p.in(h.count) : ConstTensorView()});
        if (counts_rows_here(p)) expert_rows(p).read(p.out(h.offsets), p.stream());
      },
      StepKind::chooses);
}

// The plan of most exchanges tells the rows. That of a dense one does not, and the rows of one part are not those of all.
bool MoeLayer::counts_rows_here(Tape& tape) const {
  if (exchange_ == nullptr) return true;
  return a_.here.size() == 1 && !exchange_->may_take_passes() &&
         plan_of(tape).expert_rows().empty();
}

std::int64_t MoeLayer::experts_here() const {
  return params_.places_here(w2_);
}

// Chunks, further passes and replays of a micro-batch are parts of one visit, with the rows of all of them.
MoeLayer::ExpertVisit MoeLayer::expert_visit(Tape& tape) const {
  const RunContext& context = tape.context();
  ExpertVisit v{expert_rows(tape).get(), {}};
  v.visit.kind = tape.is_backward() ? tiers::VisitKind::backward : tiers::VisitKind::forward;
  v.visit.outside = !context.training && !context.is_scheduled;
  v.visit.micro_batch = context.micro_batch_here;
  if (v.rows != nullptr) v.visit.rows = *v.rows;
  return v;
}

namespace {
ConstTensorView offsets_of(const MemberRun& run, ConstTensorView offsets) {
  return offsets.rows(run.begin, run.end + 1);
}
}  // namespace

void MoeLayer::with_weights(Tape& tape,
                            StorageId weight,
                            ConstTensorView offsets,
                            const RunWork& work) const {
  const ExpertVisit v = expert_visit(tape);
  params_.weights_of_members(weight, v.visit, tape.stream(), [&](const MemberRun& run) {
    work(run, offsets_of(run, offsets));
  });
}

// What is queued asks for the gradients when its time comes.
void MoeLayer::add_weight_gradient(Tape& tape,
                                   StorageId weight,
                                   const GroupedLinearBackwardWeight& op) const {
  if (!params_.has_gradient(weight)) return;
  tape.add_weight_gradient([&params = params_, weight, op, v = expert_visit(tape)](Backend& b) {
    params.gradients_of_members(weight, v.visit, stream_of(b), [&](const MemberRun& run) {
      GroupedLinearBackwardWeight part = op;
      part.dw = run.slots;
      part.offsets = offsets_of(run, op.offsets);
      part.slot_of_expert = run.slot_of_member;
      moesaic::run(b, part);
    });
  });
}

// What goes to the experts: x, or its projection, of all ranks along Axis::etp.
void MoeLayer::declare_expert_input(TapeSpec& tape, std::int64_t tokens) {
  const DType compute = precision_.compute;
  const std::int64_t l = row_width();
  if (options_.latent > 0) {
    a_.z = tape.activation("moe.z", {tokens, l}, compute);
    tape.step("moe.latent_down", {a_.x}, {a_.z}, [this](Tape& p) {
      linear(p, p.out(a_.z), p.in(a_.x), latent_down_);
    });
  } else {
    a_.z = a_.x;
  }
  a_.all_z = a_.z;
  if (expert_slices_ != nullptr) {
    a_.all_z = tape.activation("moe.all_z", {expert_tokens_, l}, compute);
    tape.step("moe.gather", {a_.z}, {a_.all_z}, [this](Tape& p) {
      expert_slices_->gather(p.out(a_.all_z), p.in(a_.z), p.stream());
    });
  }
}

void MoeLayer::declare_experts(TapeSpec& tape, std::size_t chunk) {
  Activations::Here& here = a_.here[chunk];
  const DType compute = precision_.compute;
  const std::int64_t rows = copies_here_, f = options_.inner, l = row_width();
  if (exchange_ == nullptr) here.z = a_.all_z;
  if (exchange_ == nullptr && options_.rows != RowFormat::plain) {
    here.z = tape.activation("moe.here_z", {tokens_here_, l}, compute);
    tape.step(
        "moe.round",
        {a_.all_z},
        {here.z},
        [this](Tape& p) { round_rows(p, p.out(a_.here[0].z), p.in(a_.all_z)); },
        StepKind::cheap);
  }
  here.xs = tape.activation("moe.xs", {rows, l}, compute);
  here.gate_up = tape.activation("moe.gate_up", {rows, 2 * f}, compute);
  here.h = tape.activation("moe.h", {rows, f}, compute);
  here.ye = tape.activation("moe.expert_output", {rows, l}, compute);
  // Backward reads the sorted rows and the product before the activation; further passes fetch their rows again.
  std::vector<ActId> passing{here.z, here.h, here.ye};
  if (exchange_ == nullptr || !exchange_->may_take_passes()) {
    passing.push_back(a_.z);
    passing.push_back(a_.all_z);
  }
  for (const ActId id : passing) {
    if (id.index != a_.x.index) tape.forward_only(id);
  }
  tape.step(
      "moe.dispatch",
      {here.z, here.token_of_row, here.offsets},
      {here.xs},
      [this, chunk](Tape& p) {
        const Activations::Here& h = a_.here[chunk];
        arrive(p, chunk);  // of a replay
        p.run(dispatch_rows(p.out(h.xs), p.in(h.z), p.in(h.token_of_row), p.in(h.offsets)));
      },
      StepKind::cheap);
  tape.step("moe.gate_up", {here.xs, here.offsets}, {here.gate_up, here.h}, [this, chunk](Tape& p) {
    const Activations::Here& h = a_.here[chunk];
    // The product is written where backward will read it: kept now, or replayed then, when nobody asks for h.
    gate_and_activate(p,
                      p.is_wanted(h.h) ? p.out(h.h) : TensorView(),
                      p.is_wanted(h.gate_up) ? p.out(h.gate_up) : TensorView(),
                      p.in(h.xs),
                      p.in(h.offsets));
  });
  tape.step("moe.down", {here.h, here.offsets}, {here.ye}, [this, chunk](Tape& p) {
    const Activations::Here& h = a_.here[chunk];
    down(p, p.out(h.ye), p.in(h.h), p.in(h.offsets));
  });
}

void MoeLayer::round_rows(Tape& tape, TensorView rounded, ConstTensorView rows) const {
  const Tape::Scope scope(tape);
  const std::int64_t n = rows.dim(0), width = rows.dim(1), columns = QuantizeFp8Block{}.block_cols;
  tape.run(QuantizeFp8Block{
      .scales =
          tape.temp({n, (width + columns - 1) / columns}, acc_dtype(rows.dtype()), "moe.scales"),
      .codes = tape.temp({n, width}, DType::u8, "moe.codes"),
      .dequant = rounded,
      .x = rows});
}

void MoeLayer::gate_and_activate(Tape& tape,
                                 TensorView h,
                                 TensorView gate_up,
                                 ConstTensorView xs,
                                 ConstTensorView offsets) const {
  with_weights(tape, w13_, offsets, [&](const MemberRun& run, ConstTensorView of_run) {
    if (!h.empty()) {
      tape.run(GroupedGluForward{.h = h,
                                 .gate_up = gate_up,
                                 .x = xs,
                                 .w = run.slots,
                                 .offsets = of_run,
                                 .slot_of_expert = run.slot_of_member,
                                 .activation = options_.activation});
    } else {
      tape.run(GroupedLinearForward{.y = gate_up,
                                    .x = xs,
                                    .w = run.slots,
                                    .offsets = of_run,
                                    .slot_of_expert = run.slot_of_member});
    }
  });
}

void MoeLayer::down(Tape& tape, TensorView ye, ConstTensorView h, ConstTensorView offsets) const {
  with_weights(tape, w2_, offsets, [&](const MemberRun& run, ConstTensorView of_run) {
    tape.run(GroupedLinearForward{
        .y = ye, .x = h, .w = run.slots, .offsets = of_run, .slot_of_expert = run.slot_of_member});
  });
}

void MoeLayer::combine_here(Tape& tape,
                            TensorView u,
                            ConstTensorView ye,
                            const SortedRows& rows) const {
  CombineRows op = combine_rows(u, ye, rows.weights, rows.row_of_assignment);
  op.token_count = rows.count;
  tape.run(op);
}

// SPEC 4.4: r = W2^T du before the weight gives dw = <r, h>.
void MoeLayer::backward_here(Tape& tape,
                             const SortedRows& sorted,
                             const ExpertInputs& from,
                             ConstTensorView du,
                             TensorView dz,
                             TensorView dweights,
                             const std::function<void()>& done) {
  const DType compute = precision_.compute;
  const ConstTensorView offsets = sorted.offsets;
  const std::int64_t rows = from.gate_up.dim(0), f = options_.inner, l = du.dim(1);
  const Tape::Scope scope(tape);  // by far the most that a layer takes

  const TensorView dys = tape.temp({rows, l}, compute, "d moe.expert_output");
  tape.run(combine_rows_backward(dys, du, sorted.token_of_row, offsets));
  const TensorView row_weight = tape.temp({rows}, precision_.stats, "moe.row_weight");
  tape.run(RowWeightForward{.row_weight = row_weight,
                            .weights = sorted.weights,
                            .row_of_assignment = sorted.row_of_assignment});
  const TensorView drow_weight = tape.temp({rows}, precision_.stats, "d moe.row_weight");
  const TensorView dgate_up = tape.temp({rows, 2 * f}, compute, "d moe.gate_up");
  const TensorView weighted_h = tape.temp({rows, f}, compute, "moe.weighted_h");
  with_weights(tape, w2_, offsets, [&](const MemberRun& run, ConstTensorView of_run) {
    tape.run(GroupedGluBackward{.dgate_up = dgate_up,
                                .drow_weight = drow_weight,
                                .h = weighted_h,
                                .dy = dys,
                                .w = run.slots,
                                .gate_up = from.gate_up,
                                .row_weight = row_weight,
                                .offsets = of_run,
                                .slot_of_expert = run.slot_of_member,
                                .activation = options_.activation,
                                .weight_h = true});
  });
  add_weight_gradient(tape, w2_, {.dy = dys, .x = weighted_h, .offsets = offsets});
  tape.run(RowWeightBackward{.dweights = dweights,
                             .drow_weight = drow_weight,
                             .row_of_assignment = sorted.row_of_assignment});
  // The gradients of the outputs are spent, unless weight gradients wait for them.
  const bool spent = tape.context().weight_gradients.mode() == WeightGradients::Mode::at_once;
  const TensorView dxs = spent ? dys : tape.temp({rows, l}, compute, "d moe.xs");
  with_weights(tape, w13_, offsets, [&](const MemberRun& run, ConstTensorView of_run) {
    tape.run(GroupedLinearBackwardInput{.dx = dxs,
                                        .dy = dgate_up,
                                        .w = run.slots,
                                        .offsets = of_run,
                                        .slot_of_expert = run.slot_of_member});
  });
  CombineRows sum = dispatch_rows_backward(dz, dxs, sorted.row_of_assignment);
  sum.token_count = sorted.count;
  tape.run(sum);
  done();
  add_weight_gradient(tape, w13_, {.dy = dgate_up, .x = from.xs, .offsets = offsets});
}

}  // namespace moesaic
