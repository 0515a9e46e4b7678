#include "core/model/moe.h"

#include "core/nn/losses.h"
#include "kernels/ops/balance.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/gemm.h"
#include "kernels/ops/grouped_gemm.h"
#include "kernels/ops/grouped_glu.h"
#include "kernels/ops/permute.h"
#include "kernels/ops/rms_norm.h"
#include "kernels/ops/step_scalars.h"

namespace moesaic {
MoeLayer::MoeLayer(ParameterStore& params, const std::string& prefix, const MoeOptions& options)
    : options_(options), prefix_(prefix), precision_(params.precision()), params_(params) {
  const std::int64_t d = options.hidden, e = options.experts,
                     l = options.latent > 0 ? options.latent : d;
  const bool needs_cutoff =
      options.bias_rule == BiasRule::quantile || options.bias_rule == BiasRule::quantile_exact;
  if (needs_cutoff && !knows_cutoff()) {
    throw UsageError(prefix +
                     ": the quantile rule balances against the best expert that was not chosen: it "
                     "needs fewer choices than experts and no group limit");
  }
  auto router = matrix_spec(prefix + "gate.weight", e, d, options.init_std, Part::router);
  router.stored_as = StoredAs::stats;
  router_ = params.declare(router);
  bias_ = params.declare_buffer({.name = prefix + "gate.e_score_correction_bias",
                                 .shape = {e},
                                 .dtype = precision_.stats,
                                 .is_parameter_in_checkpoint = true,
                                 .part = Part::router});
  counts_ = params.declare_buffer({.name = prefix + "step_counts",
                                   .shape = {e},
                                   .dtype = DType::i64,
                                   .lifetime = Lifetime::step,
                                   .reduce = BufferReduce::sum});
  if (options.bias_rule == BiasRule::quantile) {
    histogram_ = params.declare_buffer({.name = prefix + "step_histogram",
                                        .shape = {e, options.histogram_bins},
                                        .dtype = DType::i32,
                                        .lifetime = Lifetime::step,
                                        .reduce = BufferReduce::sum});
  }
  if (options.aux_loss == AuxLoss::global) {
    // Before the first step every expert counts as evenly used (SPEC 5.1).
    frequency_ = params.declare_buffer({.name = prefix + "load_frequency",
                                        .shape = {e},
                                        .dtype = precision_.stats,
                                        .initial = 1.0 / static_cast<double>(e)});
  }
  if (options.latent > 0) {
    latent_down_ = params.declare(matrix_spec(
        prefix + "routed_expert_down_proj.weight", l, d, options.init_std, Part::latent));
    if (options.latent_norm)
      latent_norm_ = params.declare(
          vector_spec(prefix + "routed_expert_norm.weight", l, Init::Kind::ones, Part::latent));
    latent_up_ = params.declare(
        matrix_spec(prefix + "routed_expert_up_proj.weight", d, l, options.init_std, Part::latent));
  }
  declare_experts_parameters(params);
  if (options.shared_inner > 0) {
    shared_ = std::make_unique<GatedMlp>(
        params,
        prefix + "shared_experts.",
        MlpOptions{d, options.shared_inner, options.activation, options.init_std},
        Part::shared_expert);
  }
}

// Each rank of an expert group holds an equal run of the experts, and of their inner width.
void MoeLayer::declare_experts_parameters(ParameterStore& params) {
  const std::int64_t f = options_.inner,
                     l = options_.latent > 0 ? options_.latent : options_.hidden;
  const auto expert = [&](const char* which, std::int64_t rows, std::int64_t cols, int inner) {
    auto s = matrix_spec(prefix_ + "experts.{}." + which + ".weight",
                         rows,
                         cols,
                         options_.init_std,
                         Part::routed_expert);
    s.members = options_.experts;
    s.active_members = options_.top_k;
    s.use_counts = counts_;
    s.placement = {{{Axis::ep, 0}, {Axis::etp, inner}}, AxisFamily::expert};
    return s;
  };
  const std::int64_t ranks = params.position().extent(Axis::ep);
  options_.inner /= params.position().extent(Axis::etp);
  w13_ = params.declare_storage(
      prefix_ + "experts.w13", options_.experts / ranks, 2 * options_.inner, l, StoredAs::compute);
  params.declare(expert("w1", f, l, 1), w13_, 0);
  params.declare(expert("w3", f, l, 1), w13_, options_.inner);
  w2_ = params.declare(expert("w2", l, f, 2));
}

void MoeLayer::declare(TapeSpec& tape, const Bounds& bounds, ActId x, ActId y) {
  a_ = {};
  a_.x = x;
  capacity_ = capacity_of(options_, bounds.batch_tokens());
  exchange_ = bounds.exchange;
  slices_ = bounds.slices;
  batch_slices_ = bounds.batch_slices;
  expert_slices_ = bounds.expert_slices;
  const std::int64_t tokens = bounds.own_tokens();
  expert_tokens_ = expert_slices_ != nullptr ? tokens * expert_slices_->size() : tokens;
  MOESAIC_CHECK((exchange_ != nullptr) == (params_.position().extent(Axis::ep) > 1),
                "experts on several ranks need an exchange");
  declare_routing(tape, tokens);
  if (capacity_ > 0) declare_capacity(tape, bounds.batch_tokens());
  // Counters change state, so they are a step of their own that nothing reads: replays never repeat it.
  tape.step(
      "moe.count",
      {a_.logits, a_.scores, a_.topk, a_.counts},
      {},
      [this](Tape& p) { count(p); },
      StepKind::chooses);
  declare_gathered_choices(tape);
  if (exchange_ != nullptr) {
    declare_exchange(tape, bounds);
  } else {
    a_.here_topk = a_.all_topk;
    a_.here_weights = a_.all_weights;
    tokens_here_ = expert_tokens_;
    copies_here_ = expert_tokens_ * options_.top_k;
  }
  declare_sort(tape);
  declare_experts(tape, tokens);
  declare_output(tape, bounds, y);
}

// The counts of all ranks are waited for behind the shared experts.
void MoeLayer::declare_exchange(TapeSpec& tape, const Bounds& bounds) {
  const ExchangeBounds& b = exchange_->bounds();
  tokens_here_ = b.rows;
  copies_here_ = b.copies;
  plan_ = tape.host_value(
      [this] { return std::make_shared<ExchangePlan>(exchange_->make_plan(params_.device())); });
  a_.plan = tape.activation("moe.exchange_plan", {b.plan_bytes}, DType::u8);
  std::vector<ActId> reads{a_.all_topk, a_.all_weights};
  if (a_.all_kept.valid()) reads.push_back(a_.all_kept);
  tape.step(
      "moe.exchange_plan",
      reads,
      {a_.plan},
      [this](Tape& p) {
        exchange_->begin_plan(
            plan_of(p),
            p.backend(),
            p.out(a_.plan),
            {.topk = p.in(a_.all_topk),
             .weights = p.in(a_.all_weights),
             .kept = a_.all_kept.valid() ? p.in(a_.all_kept) : ConstTensorView()});
      },
      StepKind::chooses);
  if (shared_) declare_shared(tape, bounds);
  a_.here_topk = tape.activation("moe.here_topk", {b.rows, options_.top_k}, DType::i32);
  a_.here_weights = tape.activation("moe.here_weights", {b.rows, options_.top_k}, precision_.stats);
  a_.here_count = tape.activation("moe.here_count", {1}, DType::i32);
  tape.step(
      "moe.exchange_choices",
      {a_.plan},
      {a_.here_topk, a_.here_weights, a_.here_count},
      [this](Tape& p) {
        exchange_->finish_plan(plan_of(p), p.backend());
        exchange_->dispatch_choices(plan_of(p),
                                    p.backend(),
                                    0,
                                    p.out(a_.here_topk),
                                    p.out(a_.here_weights),
                                    p.out(a_.here_count));
      },
      StepKind::chooses);
}

void MoeLayer::declare_sort(TapeSpec& tape) {
  const std::int64_t experts = params_.members_here(params_.params_of(w2_).front());
  a_.offsets = tape.activation("moe.offsets", {experts + 1}, DType::i32);
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
        p.run(DispatchPlan{.offsets = p.out(a_.offsets),
                           .row_of_assignment = p.out(a_.row_of_assignment),
                           .token_of_row = p.out(a_.token_of_row),
                           .topk = p.in(a_.here_topk),
                           .kept = drops ? p.in(a_.all_kept) : ConstTensorView(),
                           .token_count = count_here(p)});
      },
      StepKind::chooses);
}

ConstTensorView MoeLayer::count_here(Tape& tape) const {
  return a_.here_count.valid() ? tape.in(a_.here_count) : ConstTensorView();
}

void MoeLayer::declare_experts(TapeSpec& tape, std::int64_t tokens) {
  const DType compute = precision_.compute;
  const std::int64_t rows = copies_here_, f = options_.inner,
                     l = options_.latent > 0 ? options_.latent : options_.hidden;
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
  a_.here_z = a_.all_z;
  if (exchange_ != nullptr) {
    a_.here_z = tape.activation("moe.here_z", {tokens_here_, l}, compute);
    tape.step("moe.exchange", {a_.all_z, a_.plan, a_.here_count}, {a_.here_z}, [this](Tape& p) {
      exchange_->dispatch(plan_of(p), p.backend(), p.out(a_.here_z), p.in(a_.all_z));
    });
  }
  a_.xs = tape.activation("moe.xs", {rows, l}, compute);
  a_.gate_up = tape.activation("moe.gate_up", {rows, 2 * f}, compute);
  a_.h = tape.activation("moe.h", {rows, f}, compute);
  a_.ye = tape.activation("moe.expert_output", {rows, l}, compute);
  tape.step("moe.dispatch", {a_.here_z, a_.token_of_row, a_.offsets}, {a_.xs}, [this](Tape& p) {
    p.run(dispatch_rows(p.out(a_.xs), p.in(a_.here_z), p.in(a_.token_of_row), p.in(a_.offsets)));
  });
  tape.step("moe.gate_up", {a_.xs, a_.offsets}, {a_.gate_up, a_.h}, [this](Tape& p) {
    gate_and_activate(p);
  });
  tape.step("moe.down", {a_.h, a_.offsets}, {a_.ye}, [this](Tape& p) {
    const WeightLease w = p.weight(w2_);
    p.run(GroupedLinearForward{.y = p.out(a_.ye),
                               .x = p.in(a_.h),
                               .w = w.view(),
                               .offsets = p.in(a_.offsets),
                               .slot_of_expert = p.context().params.slot_of_member(w2_)});
  });
}

// The product is written where backward will read it: kept now, or replayed then, when nobody asks for h.
void MoeLayer::gate_and_activate(Tape& tape) {
  const WeightLease w = tape.weight(w13_);
  const ConstTensorView slots = tape.context().params.slot_of_member(w13_);
  const TensorView gate_up = tape.is_wanted(a_.gate_up) ? tape.out(a_.gate_up) : TensorView();
  if (tape.is_wanted(a_.h)) {
    tape.run(GroupedGluForward{.h = tape.out(a_.h),
                               .gate_up = gate_up,
                               .x = tape.in(a_.xs),
                               .w = w.view(),
                               .offsets = tape.in(a_.offsets),
                               .slot_of_expert = slots,
                               .activation = options_.activation});
  } else {
    tape.run(GroupedLinearForward{.y = gate_up,
                                  .x = tape.in(a_.xs),
                                  .w = w.view(),
                                  .offsets = tape.in(a_.offsets),
                                  .slot_of_expert = slots});
  }
}

void MoeLayer::declare_output(TapeSpec& tape, const Bounds& bounds, ActId y) {
  const std::int64_t tokens = bounds.own_tokens(),
                     l = options_.latent > 0 ? options_.latent : options_.hidden;
  const DType compute = precision_.compute;
  const std::vector<ActId> parts{a_.ye, a_.here_weights, a_.row_of_assignment};
  std::vector<ActId> reads = parts;
  if (exchange_ != nullptr) {
    a_.here_u = tape.activation("moe.here_u", {tokens_here_, l}, compute);
    tape.step("moe.combine_here", parts, {a_.here_u}, [this](Tape& p) {
      combine_here(p, p.out(a_.here_u));
    });
    reads = {a_.here_u, a_.plan};
  }
  const auto combine_all = [this](Tape& p, ActId u) {
    if (exchange_ == nullptr) return combine_here(p, p.out(u));
    exchange_->combine(plan_of(p), p.backend(), p.out(u), p.in(a_.here_u));
  };
  std::function<void(Tape&, ActId)> combine = combine_all;
  if (expert_slices_ != nullptr) {
    a_.all_u = tape.activation("moe.all_u", {expert_tokens_, l}, compute);
    tape.never_save(a_.all_u);
    tape.step("moe.combine_all", reads, {a_.all_u}, [this, combine_all](Tape& p) {
      combine_all(p, a_.all_u);
    });
    reads = {a_.all_u};
    combine = [this](Tape& p, ActId u) {
      expert_slices_->sum_to_own(p.out(u), p.in(a_.all_u), p.stream());
    };
  }
  if (options_.latent > 0) {
    a_.u = tape.activation("moe.u", {tokens, options_.latent}, compute);
    tape.step("moe.combine", reads, {a_.u}, [this, combine](Tape& p) { combine(p, a_.u); });
    a_.un = a_.u;
    if (options_.latent_norm) {
      a_.un = tape.activation("moe.un", {tokens, options_.latent}, compute);
      a_.u_inv_rms = tape.activation("moe.u_inv_rms", {tokens}, precision_.stats);
      tape.step("moe.norm", {a_.u}, {a_.un, a_.u_inv_rms}, [this](Tape& p) {
        const WeightLease w = p.weight(latent_norm_);
        p.run(RmsNormForward{.y = p.out(a_.un),
                             .inv_rms = p.out(a_.u_inv_rms),
                             .x = p.in(a_.u),
                             .weight = w.view(),
                             .eps = options_.eps});
      });
    }
    reads = {a_.un};
  }
  if (shared_ && exchange_ == nullptr) declare_shared(tape, bounds);
  if (a_.shared.valid()) reads.push_back(a_.shared);
  tape.step("moe.output", reads, {y}, [this, y, combine](Tape& p) {
    if (options_.latent > 0) {
      linear(p, p.out(y), p.in(a_.un), latent_up_);
    } else {
      combine(p, y);
    }
    if (a_.shared.valid()) {
      p.run(Accumulate{.y = p.out(y), .x = p.in(a_.shared)});
    } else if (shared_) {
      shared_->add_output(p, p.out(y), true);
    }
  });
}

// Where tokens are cut the shared experts see all of them and form this rank's share, like any MLP.
void MoeLayer::declare_shared(TapeSpec& tape, const Bounds& bounds) {
  if (slices_ == nullptr) return shared_->declare_inner(tape, bounds, a_.x, "moe.shared_");
  const Shape all{bounds.tokens, options_.hidden};
  a_.all_x = tape.activation("moe.shared_gathered", all, precision_.compute);
  tape.step("moe.shared_gather", {a_.x}, {a_.all_x}, [this](Tape& p) {
    slices_->gather(p.out(a_.all_x), p.in(a_.x), p.stream());
  });
  shared_->declare_inner(tape, bounds, a_.all_x, "moe.shared_");
  const Shape own{bounds.own_tokens(), options_.hidden};
  a_.shared = tape.activation("moe.shared_output", own, precision_.compute);
  tape.never_save(a_.shared);
  tape.step("moe.shared_down", {shared_->inner()}, {a_.shared}, [this, all](Tape& p) {
    const TensorView share = p.temp(all, precision_.compute, "moe.shared_share");
    shared_->add_output(p, share, false);
    slices_->sum_to_own(p.out(a_.shared), share, p.stream());
  });
}

void MoeLayer::backward_shared(Tape& tape, ConstTensorView dy, TensorView dx) {
  if (slices_ == nullptr) return shared_->backward_into(tape, dy, dx, true);
  const ConstTensorView all_dy = gathered(tape, *slices_, dy, "d moe.shared_output, all tokens");
  const TensorView all_dx = tape.temp(all_dy.shape(), precision_.compute, "d moe.shared_gathered"),
                   own = tape.temp(dx.shape(), precision_.compute, "d moe.shared_x");
  shared_->backward_into(tape, all_dy, all_dx, false);
  slices_->sum_to_own(own, all_dx, tape.stream());
  tape.run(Accumulate{.y = dx, .x = own});
}

void MoeLayer::combine_here(Tape& tape, TensorView u) const {
  CombineRows op =
      combine_rows(u, tape.in(a_.ye), tape.in(a_.here_weights), tape.in(a_.row_of_assignment));
  op.token_count = count_here(tape);
  tape.run(op);
}

// From du [T, l] to dz [T, l]; fills dweights [T, k].
TensorView MoeLayer::backward_experts(Tape& tape, ConstTensorView du, TensorView dweights) {
  const DType compute = precision_.compute, stats = precision_.stats;
  const TensorView dz = tape.temp(du.shape(), compute, "d moe.z");
  if (expert_slices_ == nullptr) {
    backward_exchange(tape, du, dz, dweights);
    return dz;
  }
  const ConstTensorView all_du = gathered(tape, *expert_slices_, du, "d moe.all_u");
  const TensorView all_dz = tape.temp(all_du.shape(), compute, "d moe.all_z"),
                   all_dweights =
                       tape.temp({expert_tokens_, options_.top_k}, stats, "d moe.all_weights");
  backward_exchange(tape, all_du, all_dz, all_dweights);
  expert_slices_->sum_to_own(dz, all_dz, tape.stream());
  expert_slices_->sum_to_own(dweights, all_dweights, tape.stream());
  return dz;
}

void MoeLayer::backward_exchange(Tape& tape,
                                 ConstTensorView du,
                                 TensorView dz,
                                 TensorView dweights) {
  if (exchange_ == nullptr) return backward_here(tape, du, dz, dweights);
  const DType compute = precision_.compute;
  tape.in(a_.plan);
  const Shape here{tokens_here_, du.dim(1)};
  const TensorView here_du = tape.temp(here, compute, "d moe.here_u"),
                   here_dz = tape.temp(here, compute, "d moe.here_z"),
                   here_dweights = tape.temp(
                       {tokens_here_, options_.top_k}, precision_.stats, "d moe.here_weights");
  ExchangePlan& plan = plan_of(tape);
  exchange_->dispatch(plan, tape.backend(), here_du, du);
  backward_here(tape, here_du, here_dz, here_dweights);
  exchange_->combine(plan, tape.backend(), dz, here_dz);
  exchange_->combine(plan, tape.backend(), dweights, here_dweights);
}

// Where the experts are; SPEC 4.4: r = W2^T du before the weight gives dw = <r, h>.
void MoeLayer::backward_here(Tape& tape, ConstTensorView du, TensorView dz, TensorView dweights) {
  const DType compute = precision_.compute;
  const ConstTensorView gate_up = tape.in(a_.gate_up), offsets = tape.in(a_.offsets),
                        xs = tape.in(a_.xs);
  for (const ActId id : {a_.token_of_row, a_.here_weights, a_.row_of_assignment})
    tape.in(id);
  const std::int64_t rows = gate_up.dim(0), f = options_.inner, l = du.dim(1);
  const ParameterStore& params = tape.context().params;
  const Tape::Scope scope(tape);  // by far the most that a layer takes

  const TensorView dys = tape.temp({rows, l}, compute, "d moe.expert_output");
  tape.run(combine_rows_backward(dys, du, tape.in(a_.token_of_row), offsets));
  const TensorView row_weight = tape.temp({rows}, precision_.stats, "moe.row_weight");
  tape.run(RowWeightForward{.row_weight = row_weight,
                            .weights = tape.in(a_.here_weights),
                            .row_of_assignment = tape.in(a_.row_of_assignment)});
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
                                .gate_up = gate_up,
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
  if (const TensorView dw13 = tape.grad(w13_); !dw13.empty()) {
    tape.run_weight_gradient(
        GroupedLinearBackwardWeight{.dw = dw13,
                                    .dy = dgate_up,
                                    .x = xs,
                                    .offsets = offsets,
                                    .slot_of_expert = params.slot_of_member(w13_)});
  }
  tape.run(RowWeightBackward{.dweights = dweights,
                             .drow_weight = drow_weight,
                             .row_of_assignment = tape.in(a_.row_of_assignment)});
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
  CombineRows sum = dispatch_rows_backward(dz, dxs, tape.in(a_.row_of_assignment));
  sum.token_count = count_here(tape);
  tape.run(sum);
}

void MoeLayer::backward(Tape& tape, ConstTensorView dy, TensorView dx) {
  const std::int64_t tokens = dy.dim(0);
  const DType compute = precision_.compute;
  ConstTensorView du = dy;
  if (options_.latent > 0) {
    const TensorView dun = tape.temp({tokens, options_.latent}, compute, "d moe.un");
    linear_backward(tape, dun, dy, tape.in(a_.un), latent_up_, false);
    if (options_.latent_norm) {
      const WeightLease w = tape.weight(latent_norm_);
      tape.run(RmsNormBackward{.dx = dun,
                               .dweight = tape.grad(latent_norm_),
                               .dy = dun,
                               .x = tape.in(a_.u),
                               .weight = w.view(),
                               .inv_rms = tape.in(a_.u_inv_rms)});
    }
    du = dun;
  }
  const TensorView dweights =
      tape.temp({tokens, options_.top_k}, precision_.stats, "d moe.weights");
  const TensorView dz = backward_experts(tape, du, dweights);
  if (options_.latent > 0) {
    linear_backward(tape, dx, dz, tape.in(a_.x), latent_down_, false);
  } else {
    tape.run(Cast{.y = dx, .x = dz});
  }
  backward_router(tape, dweights, dx);
  if (shared_) backward_shared(tape, dy, dx);
}

}  // namespace moesaic
