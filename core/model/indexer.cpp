#include "core/model/indexer.h"

#include "core/nn/losses.h"
#include "kernels/ops/elementwise.h"
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

std::int64_t visible_keys(const Tape& tape, std::int64_t pieces, std::int64_t bound) {
  return pieces > 1 ? bound / pieces * (tape.sequence().links.rank + 1) : bound;
}

TensorView add_piece_gradient(Tape& tape, TensorView sums, ConstTensorView all, const char* tag) {
  const std::int64_t end = all.dim(0), own = tape.sequence().num_tokens();
  const TensorView seen = sums.rows(0, end);
  if (end == sums.dim(0)) {
    tape.run(Cast{.y = seen, .x = all});
  } else {
    tape.run(Accumulate{.y = seen, .x = all});
  }
  const TensorView result = tape.temp({own, all.dim(1)}, all.dtype(), tag);
  tape.run(Cast{.y = result, .x = seen.rows(end - own, end)});
  return result;
}

std::size_t Indexer::piece_sum_bytes() const {
  return pieces_ > 1
             ? static_cast<std::size_t>(keys_ * options_.head_dim) * byte_size(precision_.grad)
             : 0;
}

// From the gradient of the keys that this rank's queries saw to that of its own keys, by all queries.
TensorView Indexer::own_key_gradient(Tape& tape, TensorView all, TensorView sums) const {
  if (pieces_ > 1)
    return add_piece_gradient(
        tape,
        {sums.data(), precision_.grad, {keys_, options_.head_dim}, sums.device()},
        all.rows(0, keys_of(tape)),
        "d indexer.k, own");
  if (context_ == nullptr) return all;
  if (keys_ < all.dim(0)) tape.run(Fill{.y = all.rows(keys_, all.dim(0)), .value = 0});
  const TensorView own =
      tape.temp({context_->own(all.dim(0)), all.dim(1)}, all.dtype(), "d indexer.k, own");
  context_->sum_to_own(own, all, tape.stream());
  return own;
}

void Indexer::declare(TapeSpec& tape, const Bounds& bounds, ActId x, ActId qa) {
  const std::int64_t t = bounds.tokens, h = options_.heads, n = options_.head_dim;
  const DType compute = precision_.compute, stats = precision_.stats;
  slices_ = bounds.slices;
  x_ = x;
  qa_ = qa.valid() ? qa : x;
  context_ = bounds.context;
  pieces_ = bounds.pieces;
  keys_ = bounds.key_tokens();
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
  tape.step(
      "indexer.k",
      {k_raw_},
      {k_, k_mean_, k_inv_std_},
      [this](Tape& p) {
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
      },
      StepKind::cheap);
  all_k_ = k_;
  if (context_ != nullptr) {
    tape.forward_only(k_);
    all_k_ = tape.activation("indexer.all_k", {t * context_->size(), n}, compute);
    tape.step("indexer.all_k", {k_}, {all_k_}, [this](Tape& p) {
      context_->gather(p.out(all_k_), p.in(k_), p.stream());
    });
  }
  if (pieces_ > 1) {
    tape.always_save(k_);
    all_k_ = tape.activation("indexer.all_k", {keys_, n}, compute);
    tape.never_save(all_k_);
    tape.step("indexer.all_k", {k_}, {all_k_}, [this](Tape& p) {
      p.gather_pieces(p.out(all_k_), k_, p.sequence().links.rank + 1);
    });
  }
  tape.step(
      "indexer.w", {x_}, {w_}, [this](Tape& p) { linear(p, p.out(w_), p.in(x_), weights_proj_); });
  tape.step(
      "indexer.select",
      {q_, all_k_, w_},
      {selected_},
      [this](Tape& p) { select(p); },
      StepKind::chooses);
}

void Indexer::select(Tape& tape) const {
  const TensorView selected = tape.out(selected_);
  const ConstTensorView q = tape.in(q_), k = tape.in(all_k_), w = tape.in(w_);
  IndexerSelect op{.selected = selected,
                   .scores = scores_,
                   .qi = q,
                   .ki = k.rows(0, keys_of(tape)),
                   .w = w,
                   .cu_seqlens = tape.sequence().key_documents(),
                   .given = given_};
  const bool is_plain =
      !given_.empty() || !scores_.empty() || (slices_ == nullptr && context_ == nullptr);
  if (is_plain) {
    tape.run(op);
  } else {
    select_shared(tape, q, k, w, selected);
  }
  const std::int64_t first =
      context_ != nullptr || pieces_ > 1 ? tape.sequence().links.rank * q.dim(0) : 0;
  op.given = tape.replaced_choice(prefix_, first, slices_ != nullptr, selected);
  op.scores = {};
  if (!op.given.empty()) tape.run(op);
}

// Along Axis::cp a rank chooses for its own queries, but for those that it lends, and for those that it is lent
// (PieceLinks::loan): every rank has the keys of all tokens, the queries travel, and the choice back. Along Axis::tp each
// rank does so for its run of both.
void Indexer::select_shared(Tape& tape,
                            ConstTensorView q,
                            ConstTensorView k,
                            ConstTensorView w,
                            TensorView selected) const {
  const QueryLoan& loan = tape.sequence().links.loan;
  const std::int64_t tokens = q.dim(0), away = loan.gives ? loan.rows : 0;
  const bool cut = slices_ != nullptr && loan.rows % slices_->size() == 0;
  const auto run_of = [&](std::int64_t n) { return cut ? own_queries(n) : RowRange{0, n}; };
  const RowRange lent = run_of(loan.rows), own = run_of(tokens - away);
  std::vector<ConstTensorView> out, chosen;
  std::vector<TensorView> in, back;
  TensorView guest_q, guest_w;
  if (away > 0) {
    out = {q.rows(lent.begin, lent.end), w.rows(lent.begin, lent.end)};
    back = {selected.rows(lent.begin, lent.end)};
  } else if (loan.helps()) {
    guest_q = tape.temp({loan.rows, q.dim(1), q.dim(2)}, q.dtype(), "indexer.q, lent");
    guest_w = tape.temp({loan.rows, w.dim(1)}, w.dtype(), "indexer.w, lent");
    in = {guest_q.rows(lent.begin, lent.end), guest_w.rows(lent.begin, lent.end)};
  }
  if (context_ != nullptr) context_->exchange(out, in, loan.partner, tape.stream());
  if (away < tokens)
    tape.run(IndexerSelect{.selected = selected.rows(away, tokens),
                           .qi = q.rows(away, tokens),
                           .ki = k.rows(0, keys_of(tape)),
                           .w = w.rows(away, tokens),
                           .cu_seqlens = tape.sequence().key_documents(),
                           .query_begin = own.begin,
                           .query_end = own.end});
  if (loan.helps()) {
    const TensorView guests =
        tape.temp({loan.rows, selected.dim(1)}, selected.dtype(), "indexer.selected, lent");
    tape.run(IndexerSelect{.selected = guests,
                           .qi = guest_q,
                           .ki = k.rows(0, loan.partner * tokens + loan.rows),
                           .w = guest_w,
                           .cu_seqlens = tape.sequence().lent,
                           .query_begin = lent.begin,
                           .query_end = lent.end});
    chosen = {guests.rows(lent.begin, lent.end)};
  }
  if (context_ != nullptr) context_->exchange(chosen, back, loan.partner, tape.stream());
  if (!cut) return;
  const auto gather = [&](TensorView rows, const RowRange& run) {
    if (rows.dim(0) > 0) slices_->gather(rows, rows.rows(run.begin, run.end), tape.stream());
  };
  gather(selected.rows(0, away), lent);
  gather(selected.rows(away, tokens), own);
}

RowRange Indexer::own_queries(std::int64_t tokens) const {
  if (slices_ == nullptr) return {0, tokens};
  const std::int64_t run = slices_->own(tokens);
  return {slices_->rank() * run, (slices_->rank() + 1) * run};
}

void Indexer::backward(Tape& tape, const Attention& attention, bool sparse, TensorView sums) {
  const ConstTensorView q = tape.in(q_), all_k = tape.in(all_k_), w = tape.in(w_);
  const RowRange rows = own_queries(q.dim(0));
  const std::int64_t keys = keys_of(tape);
  bool trained = false;
  for (const StorageId id : {wq_b_, wk_, k_norm_weight_, k_norm_bias_, weights_proj_})
    trained = trained || !tape.grad(id).empty();
  const DType compute = precision_.compute;
  const TensorView dq = trained ? tape.temp(q.shape(), compute, "d indexer.q") : TensorView();
  const TensorView all_dk =
      trained ? tape.temp(all_k.shape(), compute, "d indexer.k") : TensorView();
  const TensorView dw = trained ? tape.temp(w.shape(), compute, "d indexer.w") : TensorView();
  tape.run(IndexerLoss{.kl = loss_slot(tape.context().losses, Loss::indexer_kl),
                       .dqi = dq,
                       .dki = trained ? all_dk.rows(0, keys) : TensorView(),
                       .dw = dw,
                       .qi = q,
                       .ki = all_k.rows(0, keys),
                       .w = w,
                       .q = attention.q,
                       .kvb = attention.kvb,
                       .kr = attention.kr,
                       .lse = attention.lse,
                       .cu_seqlens = tape.sequence().key_documents(),
                       .selected = sparse ? tape.in(selected_) : ConstTensorView(),
                       .tokens = step_scalar(tape.context().step_scalars, StepScalar::tokens),
                       .dn = attention.qk_nope_dim,
                       .scale = attention.scale,
                       .weight = options_.kl_weight,
                       .query_begin = rows.begin,
                       .query_end = rows.end});
  if (!trained) return;
  rotate(tape, dq, true);
  const auto own = [&](auto all) { return all.rows(rows.begin, rows.end); };
  linear_backward(tape,
                  {},
                  own(dq.reshaped({dq.dim(0), dq.dim(1) * dq.dim(2)})),
                  own(tape.in(qa_)),
                  wq_b_,
                  false);
  linear_backward(tape, {}, own(dw), own(tape.in(x_)), weights_proj_, false);
  const TensorView dk = own_key_gradient(tape, all_dk, sums);
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
