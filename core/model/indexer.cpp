#include "core/model/indexer.h"

#include "core/nn/losses.h"
#include "kernels/ops/indexer.h"
#include "kernels/ops/layer_norm.h"
#include "kernels/ops/rope.h"
#include "kernels/ops/step_scalars.h"

namespace moesaic {

Indexer::Indexer(ParameterStore& params, const std::string& prefix, const MlaOptions& mla)
    : prefix_(prefix),
      options_(*mla.indexer),
      rope_(mla.rope && mla.indexer->rope_dim > 0),
      rope_theta_(mla.rope_theta),
      precision_(params.precision()) {
  const std::int64_t d = mla.hidden, source = mla.q_lora_rank > 0 ? mla.q_lora_rank : d;
  const double std = mla.init_std;
  wq_b_ = params.declare(matrix_spec(
      prefix + "wq_b.weight", options_.heads * options_.head_dim, source, std, Part::indexer));
  wk_ = params.declare(matrix_spec(prefix + "wk.weight", options_.head_dim, d, std, Part::indexer));
  k_norm_weight_ = params.declare(
      vector_spec(prefix + "k_norm.weight", options_.head_dim, Init::Kind::ones, Part::indexer));
  k_norm_bias_ = params.declare(
      vector_spec(prefix + "k_norm.bias", options_.head_dim, Init::Kind::zeros, Part::indexer));
  weights_proj_ = params.declare(
      matrix_spec(prefix + "weights_proj.weight", options_.heads, d, std, Part::indexer));
}

void Indexer::rotate(Tape& tape, TensorView x, bool inverse) const {
  if (!rope_) return;
  // The indexer rotates its FIRST columns in half-split pairs, unlike the main attention (SPEC 3.1).
  tape.run(Rope{.x = x,
                .positions = tape.sequence().positions,
                .begin = 0,
                .rotary_width = options_.rope_dim,
                .theta = rope_theta_,
                .interleaved = false,
                .inverse = inverse});
}

void Indexer::declare(TapeSpec& tape, const Bounds& bounds, ActId x, ActId qa) {
  const std::int64_t t = bounds.tokens, h = options_.heads, n = options_.head_dim;
  const DType compute = precision_.compute, stats = precision_.stats;
  x_ = x;
  qa_ = qa.valid() ? qa : x;
  q_ = tape.activation("indexer.q", {t, h, n}, compute);
  k_raw_ = tape.activation("indexer.k_raw", {t, n}, compute);
  k_ = tape.activation("indexer.k", {t, n}, compute);
  k_mean_ = tape.activation("indexer.k_mean", {t}, stats);
  k_inv_std_ = tape.activation("indexer.k_inv_std", {t}, stats);
  w_ = tape.activation("indexer.w", {t, h}, compute);
  selected_ = tape.activation("indexer.selected", {t, options_.top_k}, DType::i32);
  tape.step("indexer.q", {qa_}, {q_}, [this](Tape& p) {
    const TensorView q = p.out(q_);
    linear(p, q.reshaped({q.dim(0), q.dim(1) * q.dim(2)}), p.in(qa_), wq_b_);
    rotate(p, q, false);
  });
  tape.step("indexer.k_raw", {x_}, {k_raw_}, [this](Tape& p) {
    linear(p, p.out(k_raw_), p.in(x_), wk_);
  });
  tape.step("indexer.k", {k_raw_}, {k_, k_mean_, k_inv_std_}, [this](Tape& p) {
    const WeightLease weight = p.weight(k_norm_weight_), bias = p.weight(k_norm_bias_);
    const TensorView k = p.out(k_);
    p.run(LayerNormForward{.y = k,
                           .mean = p.out(k_mean_),
                           .inv_std = p.out(k_inv_std_),
                           .x = p.in(k_raw_),
                           .weight = weight.view(),
                           .bias = bias.view(),
                           .eps = options_.norm_eps});
    rotate(p, k.reshaped({k.dim(0), 1, k.dim(1)}), false);
  });
  tape.step(
      "indexer.w", {x_}, {w_}, [this](Tape& p) { linear(p, p.out(w_), p.in(x_), weights_proj_); });
  tape.step(
      "indexer.select",
      {q_, k_, w_},
      {selected_},
      [this](Tape& p) {
        IndexerSelect op{.selected = p.out(selected_),
                         .scores = scores_,
                         .qi = p.in(q_),
                         .ki = p.in(k_),
                         .w = p.in(w_),
                         .cu_seqlens = p.sequence().cu,
                         .given = given_};
        p.run(op);
        op.given = p.replaced_choice(prefix_, -1, op.selected);
        if (!op.given.empty()) p.run(op);
      },
      StepKind::chooses);
}

void Indexer::backward(Tape& tape, const Attention& attention, bool sparse) {
  const ConstTensorView q = tape.in(q_), k = tape.in(k_), w = tape.in(w_);
  bool trained = false;
  for (const StorageId id : {wq_b_, wk_, k_norm_weight_, k_norm_bias_, weights_proj_})
    trained = trained || !tape.grad(id).empty();
  const DType compute = precision_.compute;
  const TensorView dq = trained ? tape.temp(q.shape(), compute, "d indexer.q") : TensorView();
  const TensorView dk = trained ? tape.temp(k.shape(), compute, "d indexer.k") : TensorView();
  const TensorView dw = trained ? tape.temp(w.shape(), compute, "d indexer.w") : TensorView();
  tape.run(IndexerLoss{.kl = loss_slot(tape.context().losses, Loss::indexer_kl),
                       .dqi = dq,
                       .dki = dk,
                       .dw = dw,
                       .qi = q,
                       .ki = k,
                       .w = w,
                       .q = attention.q,
                       .kvb = attention.kvb,
                       .kr = attention.kr,
                       .lse = attention.lse,
                       .cu_seqlens = tape.sequence().cu,
                       .selected = sparse ? tape.in(selected_) : ConstTensorView(),
                       .tokens = step_scalar(tape.context().step_scalars, StepScalar::tokens),
                       .dn = attention.qk_nope_dim,
                       .scale = attention.scale,
                       .weight = options_.kl_weight});
  if (!trained) return;
  rotate(tape, dq, true);
  linear_backward(
      tape, {}, dq.reshaped({dq.dim(0), dq.dim(1) * dq.dim(2)}), tape.in(qa_), wq_b_, false);
  linear_backward(tape, {}, dw, tape.in(x_), weights_proj_, false);
  rotate(tape, dk.reshaped({dk.dim(0), 1, dk.dim(1)}), true);
  {
    const WeightLease weight = tape.weight(k_norm_weight_);
    tape.run(LayerNormBackward{.dx = dk,
                               .dweight = tape.grad(k_norm_weight_),
                               .dbias = tape.grad(k_norm_bias_),
                               .dy = dk,
                               .x = tape.in(k_raw_),
                               .weight = weight.view(),
                               .mean = tape.in(k_mean_),
                               .inv_std = tape.in(k_inv_std_)});
  }
  linear_backward(tape, {}, dk, tape.in(x_), wk_, false);
}

}  // namespace moesaic
