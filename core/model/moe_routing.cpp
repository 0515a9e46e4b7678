// The router's part of a mixture: the choice, capacity, counts and losses. What follows it is in moe.cpp.
#include <cmath>

#include "core/model/moe.h"
#include "core/nn/losses.h"
#include "kernels/ops/balance.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/permute.h"
#include "kernels/ops/step_scalars.h"

namespace moesaic {

std::int64_t capacity_of(const MoeOptions& o, std::int64_t tokens) {
  MOESAIC_CHECK(o.capacity == 0 || o.capacity_factor == 0, "two capacities");
  if (o.capacity_factor == 0) return o.capacity;
  return static_cast<std::int64_t>(std::ceil(
      o.capacity_factor * static_cast<double>(tokens * o.top_k) / static_cast<double>(o.experts)));
}

// The router knows the best score outside its choice unless it chose everything or only looked at some groups.
bool MoeLayer::knows_cutoff() const {
  const MoeOptions& o = options_;
  return o.top_k < o.experts && !(o.num_groups > 1 && o.topk_groups < o.num_groups);
}

void MoeLayer::declare_routing(TapeSpec& tape, std::int64_t tokens) {
  const std::int64_t e = options_.experts, k = options_.top_k;
  const DType stats = precision_.stats;
  a_.logits = tape.activation("moe.logits", {tokens, e}, stats);
  a_.scores = tape.activation("moe.scores", {tokens, e}, stats);
  a_.topk = tape.activation("moe.topk", {tokens, k}, DType::i32);
  a_.weights = tape.activation("moe.weights", {tokens, k}, stats);
  a_.counts = tape.activation("moe.counts", {e}, DType::i32);
  tape.step("moe.router", {a_.x}, {a_.logits}, [this](Tape& p) {
    linear(p, p.out(a_.logits), cast_to(p, p.in(a_.x), precision_.stats, "moe.x"), router_);
  });
  std::vector<ActId> chosen{a_.scores, a_.topk, a_.weights, a_.counts};
  if (knows_cutoff()) {
    a_.cutoff = tape.activation("moe.cutoff", {tokens}, stats);
    chosen.push_back(a_.cutoff);
  }
  tape.step(
      "moe.choose",
      {a_.logits},
      chosen,
      [this](Tape& p) {
        RouterForward op{.scores = p.out(a_.scores),
                         .topk = p.out(a_.topk),
                         .weights = p.out(a_.weights),
                         .cutoff = a_.cutoff.valid() ? p.out(a_.cutoff) : TensorView(),
                         .counts = p.out(a_.counts),
                         .logits = p.in(a_.logits),
                         .bias = p.context().params.buffer(bias_),
                         .given = given_,
                         .score = options_.score,
                         .num_groups = options_.num_groups,
                         .topk_groups = options_.topk_groups,
                         .renormalize = options_.renormalize,
                         .route_scale = options_.route_scale};
        p.run(op);
        op.given = p.replaced_choice(prefix_, first_token(p, op.topk.dim(0)), false, op.topk);
        if (!op.given.empty()) p.run(op);
      },
      StepKind::chooses);
}

// Of the micro-batch, where this pass has `tokens` of them.
std::int64_t MoeLayer::first_token(const Tape& tape, std::int64_t tokens) const {
  const std::int64_t run = batch_slices_ != nullptr ? batch_slices_->rank() : 0,
                     runs = batch_slices_ != nullptr ? batch_slices_->size() : 1,
                     piece = pieces_ > 1 ? tape.sequence().links.rank : 0;
  return (piece * runs + run) * tokens;
}

// A micro-batch has one capacity: its assignments compete with each other wherever they are.
void MoeLayer::declare_capacity(TapeSpec& tape, std::int64_t all_tokens) {
  const std::int64_t k = options_.top_k;
  a_.kept =
      tape.activation("moe.kept",
                      {batch_slices_ != nullptr ? batch_slices_->own(all_tokens) : all_tokens, k},
                      DType::u8);
  tape.step(
      "moe.capacity",
      {a_.topk, a_.weights},
      {a_.kept},
      [this, all_tokens, k](Tape& p) {
        ExpertCapacity op{.kept = p.out(a_.kept),
                          .topk = p.in(a_.topk),
                          .weights = p.in(a_.weights),
                          .num_experts = options_.experts,
                          .capacity = capacity_,
                          .policy = options_.drop_policy};
        if (batch_slices_ == nullptr) return p.run(op);
        const TensorView all = p.temp({all_tokens, k}, DType::u8, "moe.kept, all tokens");
        op.kept = all;
        op.topk = gathered(p, *batch_slices_, op.topk, "moe.topk, all tokens");
        op.weights = gathered(p, *batch_slices_, op.weights, "moe.weights, all tokens");
        p.run(op);
        copy_tensor(p.out(a_.kept), batch_slices_->own_rows(all), p.stream());
      },
      StepKind::chooses);
}

// What the ranks along Axis::etp chose together.
void MoeLayer::declare_gathered_choices(TapeSpec& tape) {
  a_.all_topk = a_.topk;
  a_.all_weights = a_.weights;
  a_.all_kept = a_.kept;
  if (expert_slices_ == nullptr) return;
  const Shape shape{expert_tokens_, options_.top_k};
  a_.all_topk = tape.activation("moe.all_topk", shape, DType::i32);
  a_.all_weights = tape.activation("moe.all_weights", shape, precision_.stats);
  std::vector<ActId> own{a_.topk, a_.weights}, all{a_.all_topk, a_.all_weights};
  if (a_.kept.valid()) {
    a_.all_kept = tape.activation("moe.all_kept", shape, DType::u8);
    own.push_back(a_.kept);
    all.push_back(a_.all_kept);
  }
  tape.step(
      "moe.gather_choices",
      own,
      all,
      [this, own, all](Tape& p) {
        for (std::size_t i = 0; i < own.size(); ++i)
          expert_slices_->gather(p.out(all[i]), p.in(own[i]), p.stream());
      },
      StepKind::chooses);
}

ConstTensorView MoeLayer::gathered(Tape& tape,
                                   const TokenSlices& slices,
                                   ConstTensorView own,
                                   const char* tag) const {
  const TensorView all = tape.temp({own.dim(0) * slices.size(), own.dim(1)}, own.dtype(), tag);
  slices.gather(all, own, tape.stream());
  return all;
}

RouterLosses MoeLayer::losses(Tape& tape) const {
  const TensorView scalars = tape.context().step_scalars;
  RouterLosses r;
  r.z_weight = options_.z_weight;
  r.sequence_weight = options_.aux_loss == AuxLoss::sequence ? options_.aux_weight : 0;
  r.switch_weight = options_.aux_loss == AuxLoss::switch_ ? options_.aux_weight : 0;
  r.global_weight = options_.aux_loss == AuxLoss::global ? options_.aux_weight : 0;
  r.cu = tape.sequence().batch_documents();
  if (frequency_.valid()) r.frequency = tape.context().params.buffer(frequency_);
  r.tokens = step_scalar(scalars, StepScalar::tokens);
  r.documents = step_scalar(scalars, StepScalar::documents);
  return r;
}

void MoeLayer::count(Tape& tape) {
  if (!tape.context().training) return;
  ParameterStore& params = tape.context().params;
  tape.run(AccumulateCounts{.total = params.buffer(counts_), .counts = tape.in(a_.counts)});
  if (histogram_.valid()) {
    tape.run(BalanceHistogram{.histogram = params.buffer(histogram_),
                              .scores = tape.in(a_.scores),
                              .cutoff = tape.in(a_.cutoff),
                              .bias = params.buffer(bias_)});
  }
  if (options_.bias_rule == BiasRule::quantile_exact && !margins_.empty()) {
    const std::int64_t tokens = tape.in(a_.scores).dim(0);
    tape.run(BalanceMargins{.margins = margins_.rows(margin_rows_, margin_rows_ + tokens),
                            .scores = tape.in(a_.scores),
                            .cutoff = tape.in(a_.cutoff)});
    margin_rows_ += tokens;
  }
  if (const RouterLosses r = losses(tape); r.any()) {
    const AllRouting all = all_routing(tape);
    if (losses_need_all() && batch_slices_->rank() != 0) return;  // said once
    tape.run(RouterLossForward{.balance_loss = loss_slot(tape.context().losses, Loss::balance),
                               .z_loss = loss_slot(tape.context().losses, Loss::router_z),
                               .logits = all.logits,
                               .scores = all.scores,
                               .topk = all.topk,
                               .losses = r});
  }
}

bool MoeLayer::losses_need_all() const {
  return batch_slices_ != nullptr && options_.aux_weight != 0 &&
         (options_.aux_loss == AuxLoss::sequence || options_.aux_loss == AuxLoss::switch_);
}

MoeLayer::AllRouting MoeLayer::all_routing(Tape& tape) const {
  const AllRouting own{tape.in(a_.logits), tape.in(a_.scores), tape.in(a_.topk)};
  if (!losses_need_all()) return own;
  return {gathered(tape, *batch_slices_, own.logits, "moe.logits, all tokens"),
          gathered(tape, *batch_slices_, own.scores, "moe.scores, all tokens"),
          gathered(tape, *batch_slices_, own.topk, "moe.topk, all tokens")};
}

void MoeLayer::backward_router(Tape& tape, ConstTensorView dweights, TensorView dx) {
  const ConstTensorView x = tape.in(a_.x);
  for (const ActId id : {a_.logits, a_.scores, a_.weights, a_.topk})
    tape.in(id);
  const Tape::Scope scope(tape);
  const AllRouting all = all_routing(tape);
  const TensorView all_dlogits = tape.temp(all.scores.shape(), precision_.stats, "d moe.logits");
  const auto all_tokens = [&](ConstTensorView own) {
    return losses_need_all() ? gathered(tape, *batch_slices_, own, "d moe.weights, all tokens")
                             : own;
  };
  const RouterLosses r = losses(tape);
  tape.run(RouterBackward{.dlogits = all_dlogits,
                          .dweights = all_tokens(dweights),
                          .logits = all.logits,
                          .scores = all.scores,
                          .weights = all_tokens(tape.in(a_.weights)),
                          .topk = all.topk,
                          .score = options_.score,
                          .renormalize = options_.renormalize,
                          .route_scale = options_.route_scale,
                          .losses = r});
  const ConstTensorView dlogits =
      losses_need_all() ? batch_slices_->own_rows(all_dlogits) : ConstTensorView(all_dlogits);
  const ConstTensorView xs = cast_to(tape, x, precision_.stats, "moe.x");
  if (dx.dtype() == precision_.stats) {
    linear_backward(tape, dx, dlogits, xs, router_, true);
  } else {
    const TensorView wide = tape.temp(dx.shape(), precision_.stats, "d moe.x");
    linear_backward(tape, wide, dlogits, xs, router_, false);
    tape.run(Accumulate{.y = dx, .x = wide});
  }
}

}  // namespace moesaic
