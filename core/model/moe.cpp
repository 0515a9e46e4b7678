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

// Each rank of an expert group holds equally many of the experts, at first a run, and a part of their inner width.
void MoeLayer::declare_experts_parameters(ParameterStore& params) {
  const std::int64_t f = options_.inner,
                     l = options_.latent > 0 ? options_.latent : options_.hidden;
  places_ = params.declare_places(options_.experts, options_.replicas);
  if (options_.place) {
    average_load_ = params.declare_buffer({.name = prefix_ + "experts.average_load",
                                           .shape = {options_.experts},
                                           .dtype = precision_.stats,
                                           .is_optional = true});
    saved_places_ = params.declare_buffer({.name = prefix_ + "experts.places",
                                           .shape = {options_.experts},
                                           .dtype = DType::i32,
                                           .is_optional = true});
  }
  if (options_.replicas > 0) {
    MOESAIC_CHECK(options_.place, "copies of experts follow from averages of their load");
    copied_by_ = params.declare_buffer({.name = prefix_ + "experts.copied_by",
                                        .shape = {options_.experts},
                                        .dtype = precision_.stats,
                                        .is_optional = true});
  }
  const auto expert = [&](const char* which, std::int64_t rows, std::int64_t cols, int inner) {
    auto s = matrix_spec(prefix_ + "experts.{}." + which + ".weight",
                         rows,
                         cols,
                         options_.init_std,
                         Part::routed_expert);
    s.members = options_.experts;
    s.places = places_;
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
  pieces_ = bounds.pieces;
  MOESAIC_CHECK(pieces_ == 1 || (capacity_ == 0 && options_.aux_loss != AuxLoss::sequence &&
                                 options_.aux_loss != AuxLoss::switch_),
                "what is about all tokens of a micro-batch does not work in pieces");
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
  expert_rows_ =
      tape.host_value([this] { return std::make_shared<ExpertRows>(params_, experts_here()); });
  if (exchange_ != nullptr) declare_departure(tape);
  declare_expert_input(tape, tokens);
  if (exchange_ != nullptr) {
    // Without a stream beside this one the host waits behind the shared experts; with one, rows travel beside them.
    const bool beside = exchange_->has_side();
    if (shared_ && !beside) declare_shared(tape, bounds);
    declare_arrival(tape);
    declare_dispatch(tape);
    if (shared_ && beside) declare_shared(tape, bounds);
  } else {
    a_.here.resize(1);
    a_.here[0].topk = a_.all_topk;
    a_.here[0].weights = a_.all_weights;
    tokens_here_ = expert_tokens_;
    copies_here_ = expert_tokens_ * options_.top_k;
  }
  for (std::size_t chunk = 0; chunk < a_.here.size(); ++chunk) {
    declare_sort(tape, chunk);
    if (shared_ && exchange_ == nullptr && shared_come_first()) declare_shared(tape, bounds);
    declare_experts(tape, chunk);
    if (exchange_ != nullptr) declare_way_back(tape, chunk);
  }
  declare_output(tape, bounds, y);
}

void MoeLayer::declare_output(TapeSpec& tape, const Bounds& bounds, ActId y) {
  const std::int64_t tokens = bounds.own_tokens(),
                     l = options_.latent > 0 ? options_.latent : options_.hidden;
  const DType compute = precision_.compute;
  std::vector<ActId> reads;
  if (exchange_ != nullptr) {
    reads.push_back(a_.plan);
    if (a_.returned.valid()) reads.push_back(a_.returned);
    for (const Activations::Here& chunk : a_.here)
      reads.push_back(chunk.sent.valid() ? chunk.sent : chunk.u);
  } else {
    reads = {a_.here[0].ye, a_.here[0].weights, a_.here[0].row_of_assignment};
  }
  const auto combine_all = [this](Tape& p, ActId u) {
    if (exchange_ != nullptr) return combine_exchanged(p, p.out(u));
    combine_here(p, p.out(u), p.in(a_.here[0].ye), sorted_rows(p, 0));
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
      tape.step(
          "moe.norm",
          {a_.u},
          {a_.un, a_.u_inv_rms},
          [this](Tape& p) {
            const WeightLease w = p.weight(latent_norm_);
            p.run(RmsNormForward{.y = p.out(a_.un),
                                 .inv_rms = p.out(a_.u_inv_rms),
                                 .x = p.in(a_.u),
                                 .weight = w.view(),
                                 .eps = options_.eps});
          },
          StepKind::cheap);
    }
    reads = {a_.un};
  }
  if (shared_ && !shared_come_first()) declare_shared(tape, bounds);
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

// From du [T, l] to dz [T, l]; fills dweights [T, k].
TensorView MoeLayer::backward_experts(Tape& tape, ConstTensorView du, TensorView dweights) {
  const DType compute = precision_.compute, stats = precision_.stats;
  const TensorView dz = tape.temp(du.shape(), compute, "d moe.z");
  if (expert_slices_ == nullptr) {
    backward_all(tape, du, dz, dweights);
    return dz;
  }
  const ConstTensorView all_du = gathered(tape, *expert_slices_, du, "d moe.all_u");
  const TensorView all_dz = tape.temp(all_du.shape(), compute, "d moe.all_z"),
                   all_dweights =
                       tape.temp({expert_tokens_, options_.top_k}, stats, "d moe.all_weights");
  backward_all(tape, all_du, all_dz, all_dweights);
  expert_slices_->sum_to_own(dz, all_dz, tape.stream());
  expert_slices_->sum_to_own(dweights, all_dweights, tape.stream());
  return dz;
}

void MoeLayer::backward_all(Tape& tape, ConstTensorView du, TensorView dz, TensorView dweights) {
  if (exchange_ != nullptr) return backward_exchange(tape, du, dz, dweights);
  const SortedRows sorted = sorted_rows(tape, 0);
  const ExpertInputs inputs = expert_inputs(tape, 0);
  if (options_.gradient_rows != RowFormat::plain) {
    const TensorView rounded = tape.temp(du.shape(), du.dtype(), "d moe.here_u");
    round_rows(tape, rounded, du);
    du = rounded;
  }
  backward_here(tape, sorted, inputs, du, dz, dweights, [] {});
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
