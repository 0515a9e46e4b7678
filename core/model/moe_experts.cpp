// The experts of this rank: rows sorted by expert, the grouped products, sums over a token's rows, and their backward.
#include "core/model/moe.h"
#include "kernels/checks.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/grouped_gemm.h"
#include "kernels/ops/grouped_glu.h"
#include "kernels/ops/permute.h"
#include "kernels/ops/quant.h"

namespace moesaic {

MoeLayer::SortedRows MoeLayer::sorted_rows(Tape& tape) const {
  return {.weights = tape.in(a_.here_weights),
          .count = a_.here_count.valid() ? tape.in(a_.here_count) : ConstTensorView(),
          .offsets = tape.in(a_.offsets),
          .row_of_assignment = tape.in(a_.row_of_assignment),
          .token_of_row = tape.in(a_.token_of_row)};
}

void MoeLayer::declare_sort(TapeSpec& tape) {
  a_.offsets = tape.activation("moe.offsets", {experts_here() + 1}, DType::i32);
  a_.row_of_assignment =
      tape.activation("moe.row_of_assignment", {tokens_here_, options_.top_k}, DType::i32);
  a_.token_of_row = tape.activation("moe.token_of_row", {copies_here_}, DType::i32);
  std::vector<ActId> reads{a_.here_topk};
  // What was dropped does not travel.
  const bool drops = a_.all_kept.valid() && exchange_ == nullptr;
  if (drops) reads.push_back(a_.all_kept);
  if (a_.here_count.valid()) reads.push_back(a_.here_count);
  tape.step(
      "moe.plan",
      reads,
      {a_.offsets, a_.row_of_assignment, a_.token_of_row},
      [this, drops](Tape& p) {
        arrive(p, ExchangeWay::dispatch);
        p.run(DispatchPlan{
            .offsets = p.out(a_.offsets),
            .row_of_assignment = p.out(a_.row_of_assignment),
            .token_of_row = p.out(a_.token_of_row),
            .topk = p.in(a_.here_topk),
            .kept = drops ? p.in(a_.all_kept) : ConstTensorView(),
            .token_count = a_.here_count.valid() ? p.in(a_.here_count) : ConstTensorView()});
      },
      StepKind::chooses);
}

std::int64_t MoeLayer::experts_here() const {
  return params_.members_here(params_.params_of(w2_).front());
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

void MoeLayer::declare_experts(TapeSpec& tape) {
  const DType compute = precision_.compute;
  const std::int64_t rows = copies_here_, f = options_.inner, l = row_width();
  if (exchange_ == nullptr) a_.here_z = a_.all_z;
  if (exchange_ == nullptr && options_.rows != RowFormat::plain) {
    a_.here_z = tape.activation("moe.here_z", {tokens_here_, l}, compute);
    tape.step(
        "moe.round",
        {a_.all_z},
        {a_.here_z},
        [this](Tape& p) { round_rows(p, p.out(a_.here_z), p.in(a_.all_z)); },
        StepKind::cheap);
  }
  a_.xs = tape.activation("moe.xs", {rows, l}, compute);
  a_.gate_up = tape.activation("moe.gate_up", {rows, 2 * f}, compute);
  a_.h = tape.activation("moe.h", {rows, f}, compute);
  a_.ye = tape.activation("moe.expert_output", {rows, l}, compute);
  // Backward reads the sorted rows and the product before the activation; further passes fetch their rows again.
  std::vector<ActId> passing{a_.here_z, a_.h, a_.ye};
  if (exchange_ == nullptr || !exchange_->may_take_passes()) {
    passing.push_back(a_.z);
    passing.push_back(a_.all_z);
  }
  for (const ActId id : passing) {
    if (id.index != a_.x.index) tape.forward_only(id);
  }
  tape.step(
      "moe.dispatch",
      {a_.here_z, a_.token_of_row, a_.offsets},
      {a_.xs},
      [this](Tape& p) {
        arrive(p, ExchangeWay::dispatch);  // of a replay
        p.run(
            dispatch_rows(p.out(a_.xs), p.in(a_.here_z), p.in(a_.token_of_row), p.in(a_.offsets)));
      },
      StepKind::cheap);
  tape.step("moe.gate_up", {a_.xs, a_.offsets}, {a_.gate_up, a_.h}, [this](Tape& p) {
    // The product is written where backward will read it: kept now, or replayed then, when nobody asks for h.
    gate_and_activate(p,
                      p.is_wanted(a_.h) ? p.out(a_.h) : TensorView(),
                      p.is_wanted(a_.gate_up) ? p.out(a_.gate_up) : TensorView(),
                      p.in(a_.xs),
                      p.in(a_.offsets));
  });
  tape.step("moe.down", {a_.h, a_.offsets}, {a_.ye}, [this](Tape& p) {
    down(p, p.out(a_.ye), p.in(a_.h), p.in(a_.offsets));
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
  const WeightLease w = tape.weight(w13_);
  const ConstTensorView slots = tape.context().params.slot_of_member(w13_);
  if (!h.empty()) {
    tape.run(GroupedGluForward{.h = h,
                               .gate_up = gate_up,
                               .x = xs,
                               .w = w.view(),
                               .offsets = offsets,
                               .slot_of_expert = slots,
                               .activation = options_.activation});
  } else {
    tape.run(GroupedLinearForward{
        .y = gate_up, .x = xs, .w = w.view(), .offsets = offsets, .slot_of_expert = slots});
  }
}

void MoeLayer::down(Tape& tape, TensorView ye, ConstTensorView h, ConstTensorView offsets) const {
  const WeightLease w = tape.weight(w2_);
  tape.run(GroupedLinearForward{.y = ye,
                                .x = h,
                                .w = w.view(),
                                .offsets = offsets,
                                .slot_of_expert = tape.context().params.slot_of_member(w2_)});
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
  const ParameterStore& params = tape.context().params;
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
  {
    const WeightLease w = tape.weight(w2_);
    tape.run(GroupedGluBackward{.dgate_up = dgate_up,
                                .drow_weight = drow_weight,
                                .h = weighted_h,
                                .dy = dys,
                                .w = w.view(),
                                .gate_up = from.gate_up,
                                .row_weight = row_weight,
                                .offsets = offsets,
                                .slot_of_expert = params.slot_of_member(w2_),
                                .activation = options_.activation,
                                .weight_h = true});
  }
  if (const TensorView dw2 = tape.grad(w2_); !dw2.empty()) {
    tape.run_weight_gradient(
        GroupedLinearBackwardWeight{.dw = dw2,
                                    .dy = dys,
                                    .x = weighted_h,
                                    .offsets = offsets,
                                    .slot_of_expert = params.slot_of_member(w2_)});
  }
  tape.run(RowWeightBackward{.dweights = dweights,
                             .drow_weight = drow_weight,
                             .row_of_assignment = sorted.row_of_assignment});
  // The gradients of the outputs are spent, unless weight gradients wait for them.
  const bool spent = tape.context().weight_gradients.mode() == WeightGradients::Mode::at_once;
  const TensorView dxs = spent ? dys : tape.temp({rows, l}, compute, "d moe.xs");
  {
    const WeightLease w = tape.weight(w13_);
    tape.run(GroupedLinearBackwardInput{.dx = dxs,
                                        .dy = dgate_up,
                                        .w = w.view(),
                                        .offsets = offsets,
                                        .slot_of_expert = params.slot_of_member(w13_)});
  }
  CombineRows sum = dispatch_rows_backward(dz, dxs, sorted.row_of_assignment);
  sum.token_count = sorted.count;
  tape.run(sum);
  done();
  if (const TensorView dw13 = tape.grad(w13_); !dw13.empty()) {
    tape.run_weight_gradient(
        GroupedLinearBackwardWeight{.dw = dw13,
                                    .dy = dgate_up,
                                    .x = from.xs,
                                    .offsets = offsets,
                                    .slot_of_expert = params.slot_of_member(w13_)});
  }
}

}  // namespace moesaic
