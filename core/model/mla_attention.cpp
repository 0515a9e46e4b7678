#include "core/model/mla_attention.h"

#include <cmath>

#include "kernels/ops/attention.h"
#include "kernels/ops/concat.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/gated_norm.h"
#include "kernels/ops/gemm.h"
#include "kernels/ops/head_linear.h"
#include "kernels/ops/rms_norm.h"
#include "kernels/ops/rope.h"
#include "kernels/ops/sparse_mla.h"

namespace moesaic {
namespace {

bool may_gather(const MlaOptions& options, const Bounds& bounds) {
  if (!options.indexer) return false;
  const IndexerOptions& indexer = *options.indexer;
  if (indexer.form != SparseForm::automatic) return indexer.form == SparseForm::gather;
  return bounds.longest() > indexer.gather_beyond;
}

}  // namespace

MlaAttention::MlaAttention(ParameterStore& params,
                           const std::string& prefix,
                           const MlaOptions& options)
    : options_(options), precision_(params.precision()) {
  const std::int64_t d = options.hidden, h = options.heads, ckv = options.kv_lora_rank,
                     dv = options.v_dim;
  const std::int64_t dn = options.qk_nope_dim, dr = options.qk_rope_dim;
  const double std = options.init_std;
  if (options.q_lora_rank > 0) {
    q_a_ = params.declare(
        matrix_spec(prefix + "q_a_proj.weight", options.q_lora_rank, d, std, Part::mla));
    q_a_norm_ = params.declare(vector_spec(
        prefix + "q_a_layernorm.weight", options.q_lora_rank, Init::Kind::ones, Part::mla));
    query_matrix_ = prefix + "q_b_proj.weight";
  } else {
    query_matrix_ = prefix + "q_proj.weight";
  }
  auto query = matrix_spec(query_matrix_,
                           h * (dn + dr),
                           options.q_lora_rank > 0 ? options.q_lora_rank : d,
                           std,
                           Part::mla);
  query.blocks = head_blocks(h, {dn + dr});
  q_b_ = params.declare(split_over_tp(query, 0));
  kv_a_ = params.declare(
      matrix_spec(prefix + "kv_a_proj_with_mqa.weight", ckv + dr, d, std, Part::mla));
  kv_a_norm_ = params.declare(
      vector_spec(prefix + "kv_a_layernorm.weight", ckv, Init::Kind::ones, Part::mla));
  key_value_matrix_ = prefix + "kv_b_proj.weight";
  auto kv_b = matrix_spec(key_value_matrix_, h * (dn + dv), ckv, std, Part::mla);
  kv_b.blocks = head_blocks(h, {dn, dv});
  kv_b_ = params.declare(split_over_tp(kv_b, 0));
  if (options.output_gate)
    g_ = params.declare(
        split_over_tp(matrix_spec(prefix + "g_proj.weight", h * dv, d, std, Part::mla), 0));
  o_proj_ = params.declare(
      split_over_tp(matrix_spec(prefix + "o_proj.weight", d, h * dv, std, Part::mla), 1));
  options_.heads /= params.position().extent(Axis::tp);
  first_head_ = params.position().coordinate(Axis::tp) * options_.heads;
  max_logit_ = params.declare_buffer({.name = prefix + "step_max_logit",
                                      .shape = {h},
                                      .dtype = precision_.stats,
                                      .part = Part::mla,
                                      .lifetime = Lifetime::step,
                                      .reduce = BufferReduce::max});
  if (options.indexer) indexer_ = std::make_unique<Indexer>(params, prefix + "indexer.", options);
}

double MlaAttention::scale() const {
  return 1.0 / std::sqrt(static_cast<double>(qk_dim()));
}

void MlaAttention::rotate(Tape& tape, TensorView x, std::int64_t begin, bool inverse) const {
  if (!options_.rope || options_.qk_rope_dim == 0) return;
  tape.run(Rope{.x = x,
                .positions = tape.sequence().positions,
                .begin = begin,
                .rotary_width = options_.qk_rope_dim,
                .theta = options_.rope_theta,
                .interleaved = options_.rope_interleaved,
                .inverse = inverse});
}

void MlaAttention::declare(TapeSpec& tape, const Bounds& bounds, ActId x, ActId y) {
  x_ = x;
  slices_ = bounds.slices;
  context_ = bounds.context;
  pieces_ = bounds.pieces;
  keys_ = bounds.key_tokens();
  declare_query(tape, bounds.tokens);
  declare_key_value(tape, bounds.tokens);
  if (indexer_) indexer_->declare(tape, bounds, x_, options_.q_lora_rank > 0 ? qa_ : ActId());
  may_gather_ = may_gather(options_, bounds);
  if (may_gather_) declare_latent(tape, bounds.tokens);
  declare_attention(tape, bounds.tokens, y);
}

void MlaAttention::declare_query(TapeSpec& tape, std::int64_t tokens) {
  const DType compute = precision_.compute;
  if (options_.q_lora_rank > 0) {
    qa_raw_ = tape.activation("attn.qa_raw", {tokens, options_.q_lora_rank}, compute);
    qa_ = tape.activation("attn.qa", {tokens, options_.q_lora_rank}, compute);
    qa_inv_rms_ = tape.activation("attn.qa_inv_rms", {tokens}, precision_.stats);
    tape.step("attn.qa_raw", {x_}, {qa_raw_}, [this](Tape& t) {
      linear(t, t.out(qa_raw_), t.in(x_), q_a_);
    });
    tape.step(
        "attn.qa",
        {qa_raw_},
        {qa_, qa_inv_rms_},
        [this](Tape& t) {
          const WeightLease w = t.weight(q_a_norm_);
          t.run(RmsNormForward{.y = t.out(qa_),
                               .inv_rms = t.out(qa_inv_rms_),
                               .x = t.in(qa_raw_),
                               .weight = w.view(),
                               .eps = options_.latent_eps});
        },
        StepKind::cheap);
  } else {
    qa_ = x_;
  }
  query_ = tape.activation("attn.q", {tokens, options_.heads, qk_dim()}, compute);
  tape.step("attn.q", {qa_}, {query_}, [this](Tape& t) {
    const TensorView q = t.out(query_);
    linear(t, q.reshaped({q.dim(0), q.dim(1) * q.dim(2)}), t.in(qa_), q_b_);
    rotate(t, q, options_.qk_nope_dim, false);
  });
}

void MlaAttention::declare_key_value(TapeSpec& tape, std::int64_t tokens) {
  const DType compute = precision_.compute;
  const std::int64_t ckv = options_.kv_lora_rank, dr = options_.qk_rope_dim;
  c_raw_ = tape.activation("attn.c_raw", {tokens, ckv}, compute);
  c_ = tape.activation("attn.c", {tokens, ckv}, compute);
  c_inv_rms_ = tape.activation("attn.c_inv_rms", {tokens}, precision_.stats);
  kvb_ = tape.activation(
      "attn.kvb", {keys_, options_.heads, options_.qk_nope_dim + options_.v_dim}, compute);
  tape.step("attn.c_raw", {x_}, {c_raw_}, [this, ckv](Tape& t) {
    linear_rows(t, t.out(c_raw_), t.in(x_), kv_a_, {0, ckv});
  });
  if (dr > 0) {
    kr_ = tape.activation("attn.kr", {tokens, dr}, compute);
    tape.step("attn.kr", {x_}, {kr_}, [this, ckv, dr](Tape& t) {
      const TensorView kr = t.out(kr_);
      linear_rows(t, kr, t.in(x_), kv_a_, {ckv, ckv + dr});
      rotate(t, kr.reshaped({kr.dim(0), 1, dr}), 0, false);
    });
  }
  tape.step(
      "attn.c",
      {c_raw_},
      {c_, c_inv_rms_},
      [this](Tape& t) {
        const WeightLease w = t.weight(kv_a_norm_);
        t.run(RmsNormForward{.y = t.out(c_),
                             .inv_rms = t.out(c_inv_rms_),
                             .x = t.in(c_raw_),
                             .weight = w.view(),
                             .eps = options_.latent_eps});
      },
      StepKind::cheap);
  declare_all_keys(tape, tokens);
  if (pieces_ > 1) tape.never_save(kvb_);  // each piece would keep those of all before it
  tape.step("attn.kvb", {all_c_}, {kvb_}, [this](Tape& t) {
    const TensorView kvb = t.out(kvb_).rows(0, keys_of(t));
    if (pieces_ > 1 && gathers() && !t.is_backward()) return;
    linear(t, kvb.reshaped({kvb.dim(0), kvb.dim(1) * kvb.dim(2)}), keys(t, all_c_), kv_b_);
  });
}

// The latents and shared keys of all pieces; a piece sees them up to its own end.
void MlaAttention::declare_all_keys(TapeSpec& tape, std::int64_t tokens) {
  all_c_ = c_;
  all_kr_ = kr_;
  if (context_ == nullptr && pieces_ == 1) return;
  const std::int64_t all = context_ != nullptr ? tokens * context_->size() : keys_;
  const auto gather = [&](const char* name, ActId own, std::int64_t width) {
    const ActId id = tape.activation(name, {all, width}, precision_.compute);
    if (pieces_ > 1) {
      tape.always_save(own);
      tape.never_save(id);
    } else {
      tape.forward_only(own);
    }
    tape.step(name, {own}, {id}, [this, own, id](Tape& t) {
      if (pieces_ > 1) return t.gather_pieces(t.out(id), own, t.sequence().links.rank + 1);
      context_->gather(t.out(id), t.in(own), t.stream());
    });
    return id;
  };
  all_c_ = gather("attn.all_c", c_, options_.kv_lora_rank);
  if (kr_.valid()) all_kr_ = gather("attn.all_kr", kr_, options_.qk_rope_dim);
}

ConstTensorView MlaAttention::keys(Tape& tape, ActId all) const {
  return all.valid() ? tape.in(all).rows(0, keys_of(tape)) : ConstTensorView();
}

// What the gather form reads; in the warm-up stage nothing of it is formed.
void MlaAttention::declare_latent(TapeSpec& tape, std::int64_t tokens) {
  const DType compute = precision_.compute;
  const std::int64_t h = options_.heads, ckv = options_.kv_lora_rank, dr = options_.qk_rope_dim;
  kv_ = all_c_;
  if (dr > 0) {
    kv_ = tape.activation("attn.kv", {keys_, ckv + dr}, compute);
    if (pieces_ > 1) tape.never_save(kv_);
    tape.step(
        "attn.kv",
        {all_c_, all_kr_},
        {kv_},
        [this](Tape& t) {
          const TensorView kv = t.out(kv_);  // a replay asks for it in either stage
          if (!gathers()) return;
          t.run(ConcatColumns{
              .y = kv.rows(0, keys_of(t)), .a = keys(t, all_c_), .b = keys(t, all_kr_)});
        },
        StepKind::cheap);
  }
  q_latent_ = tape.activation("attn.q_latent", {tokens, h, ckv + dr}, compute);
  tape.step("attn.q_latent", {query_}, {q_latent_}, [this, ckv, dr](Tape& t) {
    const TensorView q_latent = t.out(q_latent_);
    if (!gathers()) return;
    const std::int64_t dn = options_.qk_nope_dim;
    const WeightLease w = t.weight(kv_b_);
    t.run(HeadLinear{
        .y = {q_latent, 0}, .x = {t.in(query_), 0}, .w = w.view(), .row_begin = 0, .m = dn});
    if (dr > 0) t.run(CopyHeadColumns{.y = {q_latent, ckv}, .x = {t.in(query_), dn}, .n = dr});
  });
  o_latent_ = tape.activation("attn.o_latent", {tokens, h, ckv}, compute);
}

void MlaAttention::attend(Tape& t) {
  t.run(AttentionForward{
      .o = t.out(o_),
      .lse = t.out(lse_),
      .max_logit = max_logit_here(t.context().params),
      .q = t.in(query_),
      .kvb = keys(t, kvb_),
      .kr = keys(t, all_kr_),
      .cu_seqlens = t.sequence().key_documents(),
      .selected = indexer_ && sparse_ ? t.in(indexer_->selected()) : ConstTensorView(),
      .scale = scale()});
}

void MlaAttention::attend_latent(Tape& t) {
  t.run(SparseMlaForward{.o = t.out(o_latent_),
                         .lse = t.out(lse_),
                         .max_logit = max_logit_here(t.context().params),
                         .q = t.in(q_latent_),
                         .kv = keys(t, kv_),
                         .cu_seqlens = t.sequence().key_documents(),
                         .selected = t.in(indexer_->selected()),
                         .scale = scale()});
  const WeightLease w = t.weight(kv_b_);
  t.run(HeadLinear{.y = {t.out(o_), 0},
                   .x = {t.out(o_latent_), 0},
                   .w = w.view(),
                   .row_begin = options_.qk_nope_dim,
                   .m = options_.v_dim,
                   .transpose_w = true});
}

void MlaAttention::declare_attention(TapeSpec& tape, std::int64_t tokens, ActId y) {
  const DType compute = precision_.compute, stats = precision_.stats;
  const std::int64_t h = options_.heads, dv = options_.v_dim;
  // The output stays in the statistics type: rounding it biases the loss (SPEC 2.2).
  o_ = tape.activation("attn.o", {tokens, h, dv}, stats);
  lse_ = tape.activation("attn.lse", {h, tokens}, stats);
  std::vector<ActId> reads{query_, kvb_};
  if (all_kr_.valid()) reads.push_back(all_kr_);
  if (indexer_) reads.push_back(indexer_->selected());
  std::vector<ActId> writes{o_, lse_};
  if (may_gather_) {
    reads.push_back(q_latent_);
    reads.push_back(kv_);
    writes.push_back(o_latent_);
  }
  tape.step(
      "attn.core", reads, writes, [this](Tape& t) { gathers() ? attend_latent(t) : attend(t); });
  gated_ = tape.activation("attn.gated", {tokens, h * dv}, compute);
  std::vector<ActId> gate_reads{o_};
  if (options_.output_gate) {
    gate_ = tape.activation("attn.gate", {tokens, h * dv}, stats);
    tape.step(
        "attn.gate", {x_}, {gate_}, [this](Tape& t) { linear(t, t.out(gate_), t.in(x_), g_); });
    gate_reads.push_back(gate_);
  }
  tape.step(
      "attn.gated",
      gate_reads,
      {gated_},
      [this](Tape& t) {
        const ConstTensorView o = t.in(o_).reshaped(t.out(gated_).shape());
        if (!options_.output_gate) {
          t.run(Cast{.y = t.out(gated_), .x = o});
          return;
        }
        const bool same = o.dtype() == t.out(gated_).dtype();
        const TensorView wide =
            same ? t.out(gated_) : t.temp(o.shape(), o.dtype(), "attn.gated.wide");
        t.run(SigmoidGateForward{.y = wide, .x = o, .gate = t.in(gate_)});
        if (!same) t.run(Cast{.y = t.out(gated_), .x = wide});
      },
      StepKind::cheap);
  tape.step("attn.out", {gated_}, {y}, [this, y](Tape& t) {
    linear(t, t.out(y), t.in(gated_), o_proj_);
  });
}

// From dy to the gradient of the ungated output; starts dx (with the gate's part, or zero).
TensorView MlaAttention::backward_gate(Tape& tape, ConstTensorView dy, TensorView dx) {
  const DType stats = precision_.stats;
  const ConstTensorView gated = tape.in(gated_);
  const TensorView dgated = tape.temp(gated.shape(), precision_.compute, "d attn.gated");
  linear_backward(tape, dgated, dy, gated, o_proj_, false);
  if (!options_.output_gate) {
    tape.run(Fill{.y = dx, .value = 0.0});
    return dgated;
  }
  const ConstTensorView wide = cast_to(tape, dgated, stats, "d attn.gated.wide");
  const TensorView d_o = tape.temp(gated.shape(), stats, "d attn.o");
  const TensorView dgate = tape.temp(gated.shape(), stats, "d attn.gate");
  tape.run(SigmoidGateBackward{.dx = d_o,
                               .dgate = dgate,
                               .dy = wide,
                               .x = tape.in(o_).reshaped(gated.shape()),
                               .gate = tape.in(gate_)});
  linear_backward(tape,
                  dx,
                  cast_to(tape, dgate, precision_.compute, "d attn.gate.rounded"),
                  tape.in(x_),
                  g_,
                  false);
  return d_o;
}

MlaAttention::InputGradients MlaAttention::take_gradients(Tape& tape) {
  const DType compute = precision_.compute;
  InputGradients g;
  g.dq = tape.temp(tape.in(query_).shape(), compute, "d attn.q");
  g.all_dc = tape.temp(tape.in(all_c_).shape(), compute, "d attn.c");
  g.dc = g.all_dc.rows(0, keys_of(tape));
  if (!kr_.valid()) return g;
  g.all_dkr = tape.temp(tape.in(all_kr_).shape(), compute, "d attn.kr");
  g.dkr = g.all_dkr.rows(0, keys_of(tape));
  return g;
}

// From the gradients of the keys that this rank's queries saw to those of its own keys, by all queries.
void MlaAttention::sum_key_gradients(Tape& tape, InputGradients& g) const {
  const auto own = [&](TensorView all, const char* tag) {
    if (keys_ < all.dim(0)) tape.run(Fill{.y = all.rows(keys_, all.dim(0)), .value = 0});
    const TensorView sum = tape.temp({context_->own(all.dim(0)), all.dim(1)}, all.dtype(), tag);
    context_->sum_to_own(sum, all, tape.stream());
    return sum;
  };
  g.dc = own(g.all_dc, "d attn.c, own");
  if (!g.dkr.empty()) g.dkr = own(g.all_dkr, "d attn.kr, own");
}

// The same of pieces one after the other.
void MlaAttention::add_piece_gradients(Tape& tape, InputGradients& g) const {
  const TensorView memory = tape.context().piece_sums;
  const DType type = precision_.grad;
  const std::int64_t ckv = options_.kv_lora_rank, dr = options_.qk_rope_dim;
  const TensorView dc(memory.data(), type, {keys_, ckv}, memory.device());
  g.dc = add_piece_gradient(tape, dc, g.dc, "d attn.c, own");
  if (g.dkr.empty()) return;
  const TensorView dkr(memory.data() + sum_bytes(ckv), type, {keys_, dr}, memory.device());
  g.dkr = add_piece_gradient(tape, dkr, g.dkr, "d attn.kr, own");
}

std::size_t MlaAttention::piece_sum_bytes() const {
  if (pieces_ == 1) return 0;
  return sum_bytes(options_.kv_lora_rank) + sum_bytes(options_.qk_rope_dim) +
         (indexer_ ? indexer_->piece_sum_bytes() : 0);
}

// Of the gradients of all keys, `width` numbers each; what follows begins where kernels like it.
std::size_t MlaAttention::sum_bytes(std::int64_t width) const {
  constexpr std::size_t kAlign = 256;
  const std::size_t bytes = static_cast<std::size_t>(keys_ * width) * byte_size(precision_.grad);
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

MlaAttention::InputGradients MlaAttention::backward_attention(Tape& tape, ConstTensorView d_o) {
  const InputGradients g = take_gradients(tape);
  const ConstTensorView kvb = keys(tape, kvb_), c = keys(tape, all_c_);
  const TensorView dkvb = tape.temp(kvb.shape(), precision_.compute, "d attn.kvb");
  tape.run(AttentionBackward{
      .dq = g.dq,
      .dkvb = dkvb,
      .dkr = g.dkr,
      .d_o = d_o,
      .o = tape.in(o_),
      .lse = tape.in(lse_),
      .q = tape.in(query_),
      .kvb = kvb,
      .kr = keys(tape, all_kr_),
      .cu_seqlens = tape.sequence().key_documents(),
      .selected = indexer_ && sparse_ ? tape.in(indexer_->selected()) : ConstTensorView(),
      .scale = scale()});
  linear_backward(
      tape, g.dc, dkvb.reshaped({dkvb.dim(0), dkvb.dim(1) * dkvb.dim(2)}), c, kv_b_, false);
  return g;
}

MlaAttention::InputGradients MlaAttention::backward_latent(Tape& tape, ConstTensorView d_o) {
  const DType compute = precision_.compute;
  const std::int64_t dn = options_.qk_nope_dim, dr = options_.qk_rope_dim, dv = options_.v_dim,
                     ckv = options_.kv_lora_rank;
  const InputGradients g = take_gradients(tape);
  const ConstTensorView rounded = cast_to(tape, d_o, compute, "d attn.o.rounded"),
                        query = tape.in(query_), q = tape.in(q_latent_), o = tape.in(o_latent_),
                        kv = keys(tape, kv_);
  const WeightLease w = tape.weight(kv_b_);
  const TensorView dw = tape.grad(kv_b_),
                   d_latent = tape.temp(o.shape(), compute, "d attn.o_latent"),
                   dq = tape.temp(q.shape(), compute, "d attn.q_latent"),
                   dkv = dr > 0 ? tape.temp(kv.shape(), compute, "d attn.kv") : g.dc;
  tape.run(
      HeadLinear{.y = {d_latent, 0}, .x = {rounded, 0}, .w = w.view(), .row_begin = dn, .m = dv});
  tape.run(SparseMlaBackward{.dq = dq,
                             .dkv = dkv,
                             .d_o = d_latent,
                             .o = o,
                             .lse = tape.in(lse_),
                             .q = q,
                             .kv = kv,
                             .cu_seqlens = tape.sequence().key_documents(),
                             .selected = tape.in(indexer_->selected()),
                             .scale = scale(),
                             .key_sums = options_.indexer->key_sums});
  tape.run(HeadLinear{
      .y = {g.dq, 0}, .x = {dq, 0}, .w = w.view(), .row_begin = 0, .m = dn, .transpose_w = true});
  if (dr > 0) {
    tape.run(CopyHeadColumns{.y = {g.dq, dn}, .x = {dq, ckv}, .n = dr});
    tape.run(SplitColumns{.a = g.dc, .b = g.dkr, .y = dkv});
  }
  if (!dw.empty()) {
    tape.run_weight_gradient(HeadLinearBackwardWeight{
        .dw = dw, .a = {rounded, 0}, .b = {o, 0}, .row_begin = dn, .m = dv});
    tape.run_weight_gradient(
        HeadLinearBackwardWeight{.dw = dw, .a = {query, 0}, .b = {dq, 0}, .row_begin = 0, .m = dn});
  }
  return g;
}

void MlaAttention::backward_query(Tape& tape, TensorView dq, TensorView dx) {
  const DType compute = precision_.compute;
  const ConstTensorView x = tape.in(x_);
  rotate(tape, dq, options_.qk_nope_dim, true);
  const TensorView dq2 = dq.reshaped({dq.dim(0), dq.dim(1) * dq.dim(2)});
  if (options_.q_lora_rank == 0) {
    linear_backward(tape, dx, dq2, x, q_b_, true);
    return;
  }
  const ConstTensorView qa = tape.in(qa_);
  const TensorView dqa = tape.temp(qa.shape(), compute, "d attn.qa");
  linear_backward(tape, dqa, dq2, qa, q_b_, false);
  const TensorView dqa_raw = tape.temp(qa.shape(), compute, "d attn.qa_raw");
  {
    const WeightLease w = tape.weight(q_a_norm_);
    tape.run(RmsNormBackward{.dx = dqa_raw,
                             .dweight = tape.grad(q_a_norm_),
                             .dy = dqa,
                             .x = tape.in(qa_raw_),
                             .weight = w.view(),
                             .inv_rms = tape.in(qa_inv_rms_)});
  }
  linear_backward(tape, dx, dqa_raw, x, q_a_, true);
}

void MlaAttention::backward_projections(Tape& tape, const InputGradients& g, TensorView dx) {
  const std::int64_t ckv = options_.kv_lora_rank, dr = options_.qk_rope_dim;
  const ConstTensorView x = tape.in(x_);
  backward_query(tape, g.dq, dx);
  {
    const WeightLease w = tape.weight(kv_a_norm_);
    tape.run(RmsNormBackward{.dx = g.dc,
                             .dweight = tape.grad(kv_a_norm_),
                             .dy = g.dc,
                             .x = tape.in(c_raw_),
                             .weight = w.view(),
                             .inv_rms = tape.in(c_inv_rms_)});
  }
  linear_rows_backward(tape, dx, g.dc, x, kv_a_, {0, ckv}, true);
  if (dr > 0) {
    rotate(tape, g.dkr.reshaped({g.dkr.dim(0), 1, dr}), 0, true);
    linear_rows_backward(tape, dx, g.dkr, x, kv_a_, {ckv, ckv + dr}, true);
  }
}

void MlaAttention::backward(Tape& tape, ConstTensorView dy, TensorView dx) {
  const TensorView d_gated = backward_gate(tape, dy, dx);
  const ConstTensorView d_o = d_gated.reshaped(tape.in(o_).shape());
  InputGradients g = gathers() ? backward_latent(tape, d_o) : backward_attention(tape, d_o);
  if (context_ != nullptr) sum_key_gradients(tape, g);
  if (pieces_ > 1) add_piece_gradients(tape, g);
  if (indexer_) backward_indexer(tape);
  backward_projections(tape, g, dx);
}

void MlaAttention::backward_indexer(Tape& tape) {
  ConstTensorView q = tape.in(query_), kvb = keys(tape, kvb_), lse = tape.in(lse_);
  if (slices_ != nullptr) {
    q = all_heads(tape, q, "attn.q, all heads");
    kvb = all_heads(tape, kvb, "attn.kvb, all heads");
    const TensorView all =
        tape.temp({lse.dim(0) * slices_->size(), lse.dim(1)}, lse.dtype(), "attn.lse, all heads");
    slices_->gather(all, lse, tape.stream());
    lse = all;
  }
  TensorView sums;
  if (pieces_ > 1) {
    const TensorView all = tape.context().piece_sums;
    sums = all.rows(static_cast<std::int64_t>(piece_sum_bytes() - indexer_->piece_sum_bytes()),
                    static_cast<std::int64_t>(piece_sum_bytes()));
  }
  indexer_->backward(tape,
                     {.q = q,
                      .kvb = kvb,
                      .kr = keys(tape, all_kr_),
                      .lse = lse,
                      .qk_nope_dim = options_.qk_nope_dim,
                      .scale = scale()},
                     sparse_,
                     sums);
}

// [T, heads here, n] of every rank -> [T, all heads, n].
ConstTensorView MlaAttention::all_heads(Tape& tape, ConstTensorView own, const char* tag) const {
  const std::int64_t tokens = own.dim(0), width = own.dim(1) * own.dim(2), ranks = slices_->size();
  const TensorView by_rank = tape.temp({ranks * tokens, 1, width}, own.dtype(), tag),
                   all = tape.temp({tokens, own.dim(1) * ranks, own.dim(2)}, own.dtype(), tag);
  slices_->gather(by_rank, own, tape.stream());
  for (std::int64_t r = 0; r < ranks; ++r) {
    tape.run(CopyHeadColumns{.y = {all.reshaped({tokens, 1, width * ranks}), r * width},
                             .x = {by_rank.rows(r * tokens, (r + 1) * tokens), 0},
                             .n = width});
  }
  return all;
}

}  // namespace moesaic
