#include "core/model/kda_attention.h"

#include <cmath>

#include "kernels/ops/elementwise.h"
#include "kernels/ops/gated_norm.h"
#include "kernels/ops/kda_chunk.h"
#include "kernels/ops/kda_prepare.h"
#include "kernels/ops/short_conv.h"

namespace moesaic {

KdaAttention::KdaAttention(ParameterStore& params,
                           const std::string& prefix,
                           const KdaOptions& options)
    : options_(options), precision_(params.precision()) {
  const std::int64_t d = options.hidden, h = options.heads, k = options.head_dim, p = h * k;
  const double std = options.init_std;
  const char* names[3] = {"q", "k", "v"};
  for (int i = 0; i < 3; ++i) {
    auto proj =
        split_over_tp(matrix_spec(prefix + names[i] + "_proj.weight", p, d, std, Part::kda), 0);
    proj.blocks = head_blocks(h, {k});
    qkv_[i].proj = params.declare(proj);
  }
  for (int i = 0; i < 3; ++i) {
    ParameterSpec conv;
    conv.name = prefix + names[i] + "_conv1d.weight";
    conv.shape = {p, 1, options.conv_kernel};
    const double bound = 1.0 / std::sqrt(static_cast<double>(options.conv_kernel));
    conv.init = {Init::Kind::uniform, -bound, bound};
    conv.part = Part::kda;
    conv.stored_as = StoredAs::stats;
    qkv_[i].conv = params.declare(split_over_tp(conv, 0));
  }
  f_a_ = params.declare(matrix_spec(prefix + "f_a_proj.weight", k, d, std, Part::kda));
  f_b_ = params.declare(
      split_over_tp(matrix_spec(prefix + "f_b_proj.weight", p, k, std, Part::kda), 0));
  b_proj_ =
      params.declare(split_over_tp(matrix_spec(prefix + "b_proj.weight", h, d, std, Part::kda), 0));
  ParameterSpec a_log;
  a_log.name = prefix + "A_log";
  a_log.shape = options.a_log_entries > 0 ? Shape{options.a_log_entries} : Shape{1, 1, h, 1};
  // K3 starts at 0; Kimi-Linear at log U(1, 16) (SPEC 1.3).
  a_log.init = options.gate_lower_bound ? Init{Init::Kind::zeros, 0, 0}
                                        : Init{Init::Kind::log_uniform, 1.0, 16.0};
  a_log.part = Part::kda;
  a_log.stored_as = StoredAs::stats;
  a_log_ = params.declare(a_log);
  auto dt_bias =
      vector_spec(prefix + "dt_bias", p, Init::Kind::inverse_softplus, Part::kda, StoredAs::stats);
  dt_bias.init = {Init::Kind::inverse_softplus, 1e-3, 1e-1};
  dt_bias_ = params.declare(split_over_tp(dt_bias, 0));
  if (options.full_rank_gate) {
    g_ = params.declare(
        split_over_tp(matrix_spec(prefix + "g_proj.weight", p, d, std, Part::kda), 0));
  } else {
    g_a_ = params.declare(matrix_spec(prefix + "g_a_proj.weight", k, d, std, Part::kda));
    g_b_ = params.declare(
        split_over_tp(matrix_spec(prefix + "g_b_proj.weight", p, k, std, Part::kda), 0));
  }
  o_norm_ = params.declare(
      vector_spec(prefix + "o_norm.weight", k, Init::Kind::ones, Part::kda, StoredAs::stats));
  o_proj_ =
      params.declare(split_over_tp(matrix_spec(prefix + "o_proj.weight", d, p, std, Part::kda), 1));
  options_.heads /= params.position().extent(Axis::tp);
  first_head_ = params.position().coordinate(Axis::tp) * options_.heads;
}

void KdaAttention::declare(TapeSpec& tape, const Bounds& bounds, ActId x, ActId y) {
  x_ = x;
  context_ = bounds.context;
  in_pieces_ = bounds.pieces > 1;
  declare_projections(tape, bounds.tokens);
  declare_core(tape, bounds.tokens);
  declare_output(tape, bounds.tokens, y);
}

void KdaAttention::declare_projections(TapeSpec& tape, std::int64_t tokens) {
  const DType compute = precision_.compute;
  const std::int64_t p = options_.heads * options_.head_dim;
  const char* raw[3] = {"attn.q_raw", "attn.k_raw", "attn.v_raw"};
  const char* out[3] = {"attn.q_conv", "attn.k_conv", "attn.v"};
  for (int i = 0; i < 3; ++i) {
    Stream3& s = qkv_[i];
    s.raw = tape.activation(raw[i], {tokens, p}, compute);
    s.out = tape.activation(out[i], {tokens, p}, compute);
    if (i < 2) tape.forward_only(s.out);  // the core's queries and keys are those of attn.prepare
    tape.step(raw[i], {x_}, {s.raw}, [this, i](Tape& t) {
      linear(t, t.out(qkv_[i].raw), t.in(x_), qkv_[i].proj);
    });
  }
  declare_halo(tape, p);
  declare_tail(tape, p);
  for (int i = 0; i < 3; ++i) {
    const Stream3& s = qkv_[i];
    std::vector<ActId> reads{s.raw};
    if (halo_.valid()) reads.push_back(halo_);
    tape.step(
        out[i],
        reads,
        {s.out},
        [this, i](Tape& t) {
          const WeightLease w = t.weight(qkv_[i].conv);
          t.run(ShortConvForward{.y = t.out(qkv_[i].out),
                                 .x = t.in(qkv_[i].raw),
                                 .w = w.view().reshaped({w.view().dim(0), options_.conv_kernel}),
                                 .history = history(t, i),
                                 .cu_seqlens = t.sequence().cu});
        },
        StepKind::cheap);
  }
  f_inner_ = tape.activation("attn.f_inner", {tokens, options_.head_dim}, compute);
  z_ = tape.activation("attn.z", {tokens, p}, compute);
  beta_logit_ = tape.activation("attn.beta_logit", {tokens, options_.heads}, compute);
  tape.step("attn.f_inner", {x_}, {f_inner_}, [this](Tape& t) {
    linear(t, t.out(f_inner_), t.in(x_), f_a_);
  });
  tape.step(
      "attn.z", {f_inner_}, {z_}, [this](Tape& t) { linear(t, t.out(z_), t.in(f_inner_), f_b_); });
  tape.step("attn.beta_logit", {x_}, {beta_logit_}, [this](Tape& t) {
    linear(t, t.out(beta_logit_), t.in(x_), b_proj_);
  });
}

void KdaAttention::declare_core(TapeSpec& tape, std::int64_t tokens) {
  const DType compute = precision_.compute, stats = precision_.stats;
  const Shape heads = heads3(tokens);
  q_ = tape.activation("attn.q", heads, compute);
  k_ = tape.activation("attn.k", heads, compute);
  g_decay_ = tape.activation("attn.g", heads, stats);
  beta_ = tape.activation("attn.beta", {tokens, options_.heads}, stats);
  q_rstd_ = tape.activation("attn.q_rstd", {tokens, options_.heads}, stats);
  k_rstd_ = tape.activation("attn.k_rstd", {tokens, options_.heads}, stats);
  tape.step(
      "attn.prepare",
      {qkv_[0].out, qkv_[1].out, z_, beta_logit_},
      {q_, k_, g_decay_, beta_, q_rstd_, k_rstd_},
      [this](Tape& t) {
        const WeightLease a_log = t.weight(a_log_), dt_bias = t.weight(dt_bias_);
        const Shape shape = heads3(t.in(z_).dim(0));
        t.run(KdaPrepareForward{.q = t.out(q_),
                                .k = t.out(k_),
                                .g = t.out(g_decay_),
                                .beta = t.out(beta_),
                                .q_rstd = t.out(q_rstd_),
                                .k_rstd = t.out(k_rstd_),
                                .q_raw = t.in(qkv_[0].out).reshaped(shape),
                                .k_raw = t.in(qkv_[1].out).reshaped(shape),
                                .z = t.in(z_).reshaped(shape),
                                .beta_logit = t.in(beta_logit_),
                                .a_log = own_heads(a_log.view()),
                                .dt_bias = dt_bias.view(),
                                .g_min = options_.gate_lower_bound});
      },
      StepKind::cheap);
  std::vector<ActId> reads{q_, k_, qkv_[2].out, g_decay_, beta_};
  if (context_ != nullptr) {
    declare_states(tape);
    reads.push_back(state_in_);
  }
  o_ = tape.activation("attn.o", heads, compute);
  std::vector<ActId> writes{o_};
  state_out_ = ActId();
  if (in_pieces_) {
    state_out_ = tape.activation(
        "attn.state_out", {1, options_.heads, options_.head_dim, options_.head_dim}, stats);
    tape.always_save(state_out_);
    writes.push_back(state_out_);
  }
  tape.step("attn.core", reads, writes, [this](Tape& t) {
    const bool is_continued = in_pieces_ && t.sequence().links.continued();
    t.run(KdaChunkForward{
        .o = t.out(o_),
        .s_final = is_continued && t.is_wanted(state_out_) ? t.out(state_out_) : final_states_,
        .q = t.in(q_),
        .k = t.in(k_),
        .v = t.in(qkv_[2].out).reshaped(t.in(q_).shape()),
        .g = t.in(g_decay_),
        .beta = t.in(beta_),
        .s0 = entering_state(t),
        .cu_seqlens = t.sequence().cu,
        .chunk_size = static_cast<int>(options_.chunk_size)});
  });
}

void KdaAttention::declare_output(TapeSpec& tape, std::int64_t tokens, ActId y) {
  const DType compute = precision_.compute;
  const std::int64_t p = options_.heads * options_.head_dim;
  gate_ = tape.activation("attn.gate", {tokens, p}, compute);
  if (options_.full_rank_gate) {
    tape.step(
        "attn.gate", {x_}, {gate_}, [this](Tape& t) { linear(t, t.out(gate_), t.in(x_), g_); });
  } else {
    gate_inner_ = tape.activation("attn.gate_inner", {tokens, options_.head_dim}, compute);
    tape.step("attn.gate_inner", {x_}, {gate_inner_}, [this](Tape& t) {
      linear(t, t.out(gate_inner_), t.in(x_), g_a_);
    });
    tape.step("attn.gate", {gate_inner_}, {gate_}, [this](Tape& t) {
      linear(t, t.out(gate_), t.in(gate_inner_), g_b_);
    });
  }
  normed_ = tape.activation("attn.normed", {tokens, p}, compute);
  inv_rms_ = tape.activation("attn.inv_rms", {tokens, options_.heads}, precision_.stats);
  tape.step(
      "attn.norm",
      {o_, gate_},
      {normed_, inv_rms_},
      [this](Tape& t) {
        const WeightLease w = t.weight(o_norm_);
        const Shape shape = t.in(o_).shape();
        t.run(GatedRmsNormForward{.y = t.out(normed_).reshaped(shape),
                                  .inv_rms = t.out(inv_rms_),
                                  .x = t.in(o_),
                                  .gate = t.in(gate_).reshaped(shape),
                                  .weight = w.view(),
                                  .eps = options_.eps});
      },
      StepKind::cheap);
  tape.step("attn.out", {normed_}, {y}, [this, y](Tape& t) {
    linear(t, t.out(y), t.in(normed_), o_proj_);
  });
}

// From dy to the gradient of the core's output; starts dx with the gate's part.
TensorView KdaAttention::backward_output(Tape& tape, ConstTensorView dy, TensorView dx) {
  const DType compute = precision_.compute;
  const ConstTensorView o = tape.in(o_), normed = tape.in(normed_);
  const TensorView dnormed = tape.temp(normed.shape(), compute, "d attn.normed");
  linear_backward(tape, dnormed, dy, normed, o_proj_, false);
  const TensorView d_o = tape.temp(o.shape(), compute, "d attn.o");
  const TensorView dgate = tape.temp(normed.shape(), compute, "d attn.gate");
  {
    const WeightLease w = tape.weight(o_norm_);
    tape.run(GatedRmsNormBackward{.dx = d_o,
                                  .dgate = dgate.reshaped(o.shape()),
                                  .dweight = tape.grad(o_norm_),
                                  .dy = dnormed.reshaped(o.shape()),
                                  .x = o,
                                  .gate = tape.in(gate_).reshaped(o.shape()),
                                  .weight = w.view(),
                                  .inv_rms = tape.in(inv_rms_)});
  }
  if (options_.full_rank_gate) {
    linear_backward(tape, dx, dgate, tape.in(x_), g_, false);
  } else {
    const ConstTensorView inner = tape.in(gate_inner_);
    const TensorView dinner = tape.temp(inner.shape(), compute, "d attn.gate_inner");
    linear_backward(tape, dinner, dgate, inner, g_b_, false);
    linear_backward(tape, dx, dinner, tape.in(x_), g_a_, false);
  }
  return d_o;
}

void KdaAttention::backward_core(Tape& tape, ConstTensorView d_o, TensorView dx) {
  const DType compute = precision_.compute, stats = precision_.stats;
  const Shape heads = d_o.shape();
  const std::int64_t tokens = heads[0];
  const Shape flat{tokens, options_.heads * options_.head_dim};
  const ConstTensorView x = tape.in(x_);
  TensorView d[3];
  for (auto& view : d)
    view = tape.temp(heads, compute, "d attn.qkv");
  const TensorView dg = tape.temp(heads, stats, "d attn.g");
  const TensorView dbeta = tape.temp({tokens, options_.heads}, stats, "d attn.beta");
  const bool returns = returns_gradients(tape);
  const ConstTensorView ds_final = leaving_gradient(tape, d_o);
  const TensorView ds0 =
      returns ? tape.temp(tape.own(state_out_).shape(), stats, "d attn.state_in") : TensorView();
  tape.run(KdaChunkBackward{.dq = d[0],
                            .dk = d[1],
                            .dv = d[2],
                            .dg = dg,
                            .dbeta = dbeta,
                            .ds0 = ds0,
                            .d_o = d_o,
                            .ds_final = ds_final,
                            .q = tape.in(q_),
                            .k = tape.in(k_),
                            .v = tape.in(qkv_[2].out).reshaped(heads),
                            .g = tape.in(g_decay_),
                            .beta = tape.in(beta_),
                            .s0 = entering_state(tape),
                            .cu_seqlens = tape.sequence().cu,
                            .chunk_size = static_cast<int>(options_.chunk_size)});
  if (returns) copy_tensor(tape.of_piece_before(state_out_), ds0, tape.stream());
  const TensorView dz = tape.temp(heads, compute, "d attn.z");
  const TensorView dbeta_logit = tape.temp({tokens, options_.heads}, compute, "d attn.beta_logit");
  {
    const WeightLease a_log = tape.weight(a_log_), dt_bias = tape.weight(dt_bias_);
    tape.run(KdaPrepareBackward{.dq_raw = d[0],
                                .dk_raw = d[1],
                                .dz = dz,
                                .dbeta_logit = dbeta_logit,
                                .da_log = own_heads(tape.grad(a_log_)),
                                .ddt_bias = tape.grad(dt_bias_),
                                .dq = d[0],
                                .dk = d[1],
                                .dg = dg,
                                .dbeta = dbeta,
                                .q = tape.in(q_),
                                .k = tape.in(k_),
                                .q_rstd = tape.in(q_rstd_),
                                .k_rstd = tape.in(k_rstd_),
                                .z = tape.in(z_).reshaped(heads),
                                .beta_logit = tape.in(beta_logit_),
                                .a_log = own_heads(a_log.view()),
                                .dt_bias = dt_bias.view(),
                                .g_min = options_.gate_lower_bound});
  }
  linear_backward(tape, dx, dbeta_logit, x, b_proj_, true);
  const ConstTensorView inner = tape.in(f_inner_);
  const TensorView dinner = tape.temp(inner.shape(), compute, "d attn.f_inner");
  linear_backward(tape, dinner, dz.reshaped(flat), inner, f_b_, false);
  linear_backward(tape, dx, dinner, x, f_a_, true);
  const bool has_rows_before = halo_.valid() || (returns && tail_.valid());
  const TensorView dhalo =
      has_rows_before ? tape.temp(rows_before_shape(), compute, "d attn.halo") : TensorView();
  for (int i = 0; i < 3; ++i) {
    const TensorView draw = d[i].reshaped(flat);
    const WeightLease w = tape.weight(qkv_[i].conv);
    const Shape taps{w.view().dim(0), options_.conv_kernel};
    const TensorView dw = tape.grad(qkv_[i].conv);
    tape.run(ShortConvBackward{.dx = draw,
                               .dw = dw.empty() ? dw : dw.reshaped(taps),
                               .dhistory = has_rows_before ? dhalo.rows(i, i + 1) : TensorView(),
                               .dy = draw,
                               .x = tape.in(qkv_[i].raw),
                               .w = w.view().reshaped(taps),
                               .history = history(tape, i),
                               .cu_seqlens = tape.sequence().cu});
  }
  if (halo_.valid() || tail_.valid()) return_halo(tape, dhalo, d);
  for (int i = 0; i < 3; ++i)
    linear_backward(tape, dx, d[i].reshaped(flat), x, qkv_[i].proj, true);
}

void KdaAttention::backward(Tape& tape, ConstTensorView dy, TensorView dx) {
  const TensorView d_o = backward_output(tape, dy, dx);
  backward_core(tape, d_o, dx);
}

}  // namespace moesaic
