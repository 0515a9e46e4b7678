// KdaAttention where sequences are cut along Axis::cp: rows for the convolution and states of the recurrence come from the
// ranks before, their gradients from the ranks after. Everybody takes part in every exchange, whatever its documents are.
// Of pieces one after the other on one rank they lie in the tapes of the pieces.
#include <algorithm>

#include "core/model/kda_attention.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/kda_segment.h"

namespace moesaic {
namespace {

template <class View>
View without_first_dim(const View& view) {
  const Shape& s = view.shape();
  return view.reshaped({s[1], s[2], s[3]});
}

}  // namespace

// The rows before the piece, of q, k and v: the last ones of the previous rank's last document, zeros before it.
void KdaAttention::declare_halo(TapeSpec& tape, std::int64_t channels) {
  halo_ = ActId();
  if (context_ == nullptr || options_.conv_kernel == 1) return;
  const std::int64_t rows = options_.conv_kernel - 1;
  halo_ = tape.activation("attn.halo", {3, rows, channels}, precision_.compute);
  tape.step("attn.halo", {qkv_[0].raw, qkv_[1].raw, qkv_[2].raw}, {halo_}, [this](Tape& t) {
    const TensorView halo = t.out(halo_), tail = t.temp(halo.shape(), halo.dtype(), "attn.tail");
    fill_tail(t, tail);
    t.run(Fill{.y = halo, .value = 0});
    context_->pass_on(halo, tail, t.stream());
  });
}

// What the next of the pieces that come one after the other finds before it.
void KdaAttention::declare_tail(TapeSpec& tape, std::int64_t channels) {
  tail_ = ActId();
  if (!in_pieces_ || options_.conv_kernel == 1) return;
  tail_ = tape.activation("attn.tail", {3, options_.conv_kernel - 1, channels}, precision_.compute);
  tape.always_save(tail_);
  tape.step("attn.tail", {qkv_[0].raw, qkv_[1].raw, qkv_[2].raw}, {tail_}, [this](Tape& t) {
    fill_tail(t, t.out(tail_));
  });
}

void KdaAttention::fill_tail(Tape& tape, TensorView tail) const {
  const std::int64_t rows = tail.dim(1), channels = tail.dim(2),
                     there = std::min(rows, tape.sequence().links.last_tokens);
  tape.run(Fill{.y = tail, .value = 0});
  for (int i = 0; i < 3; ++i) {
    const ConstTensorView raw = tape.in(qkv_[i].raw);
    copy_tensor(tail.rows(i, i + 1).reshaped({rows, channels}).rows(rows - there, rows),
                raw.rows(raw.dim(0) - there, raw.dim(0)),
                tape.stream());
  }
}

ConstTensorView KdaAttention::history(Tape& tape, int i) const {
  const bool continues = tape.sequence().links.continues();
  if (tail_.valid())
    return continues ? tape.of_piece_before(tail_).rows(i, i + 1) : ConstTensorView();
  if (!halo_.valid()) return {};
  const ConstTensorView halo = tape.in(halo_);
  return continues ? halo.rows(i, i + 1) : ConstTensorView();
}

// What the next piece's outputs said about the last rows of this one's last document.
void KdaAttention::return_halo(Tape& tape,
                               ConstTensorView dhalo,
                               const TensorView (&draw)[3]) const {
  const bool continued = tape.sequence().links.continued();
  if (tail_.valid()) {
    if (continued) add_to_tail(tape, tape.own(tail_), draw);
    if (!dhalo.empty()) copy_tensor(tape.of_piece_before(tail_), dhalo, tape.stream());
    return;
  }
  const TensorView from_next = tape.temp(dhalo.shape(), dhalo.dtype(), "d attn.tail");
  context_->pass_back(from_next, dhalo, tape.stream());
  if (continued) add_to_tail(tape, from_next, draw);
}

void KdaAttention::add_to_tail(Tape& tape,
                               ConstTensorView from_next,
                               const TensorView (&draw)[3]) const {
  const std::int64_t rows = from_next.dim(1), channels = from_next.dim(2),
                     there = std::min(rows, tape.sequence().links.last_tokens);
  for (int i = 0; i < 3; ++i) {
    const TensorView flat = draw[i].reshaped({draw[i].dim(0), channels});
    tape.run(Accumulate{
        .y = flat.rows(flat.dim(0) - there, flat.dim(0)),
        .x = from_next.rows(i, i + 1).reshaped({rows, channels}).rows(rows - there, rows)});
  }
}

// The maps of all pieces, and the state with which this one's first document begins.
void KdaAttention::declare_states(TapeSpec& tape) {
  const DType stats = precision_.stats;
  const std::int64_t ranks = context_->size(), h = options_.heads, n = options_.head_dim;
  const Shape all{ranks, h, n, n}, own{h, n, n};
  state_m_ = tape.activation("attn.state_m", all, stats);
  state_e_ = tape.activation("attn.state_e", all, stats);
  state_in_ = tape.activation("attn.state_in", {1, h, n, n}, stats);
  tape.never_save(state_e_);
  tape.step("attn.state_maps",
            {k_, qkv_[2].out, g_decay_, beta_},
            {state_m_, state_e_},
            [this, own](Tape& t) {
              const TensorView m = t.temp(own, precision_.stats, "attn.state_m, own"),
                               e = t.temp(own, precision_.stats, "attn.state_e, own");
              // Read in any case: a replay of what was not saved may need the other ranks.
              const ConstTensorView k = t.in(k_), v = t.in(qkv_[2].out), g = t.in(g_decay_),
                                    beta = t.in(beta_);
              if (t.sequence().links.continued()) {
                t.run(KdaSegmentMap{.m = m,
                                    .e = e,
                                    .k = k,
                                    .v = v.reshaped(k.shape()),
                                    .g = g,
                                    .beta = beta,
                                    .cu_seqlens = t.sequence().cu});
              } else {
                t.run(Fill{.y = m, .value = 0});
                t.run(Fill{.y = e, .value = 0});
              }
              context_->gather(t.out(state_m_), m, t.stream());
              context_->gather(t.out(state_e_), e, t.stream());
            });
  tape.step("attn.state_in", {state_m_, state_e_}, {state_in_}, [this](Tape& t) {
    const PieceLinks& links = t.sequence().links;
    const ConstTensorView m = t.in(state_m_), e = t.in(state_e_);
    const TensorView state = t.out(state_in_);
    if (!links.continues()) return t.run(Fill{.y = state, .value = 0});
    t.run(KdaSegmentChain{.state = without_first_dim(state),
                          .m = m.rows(links.first, links.rank),
                          .e = e.rows(links.first, links.rank)});
  });
}

ConstTensorView KdaAttention::entering_state(Tape& tape) const {
  if (in_pieces_)
    return tape.sequence().links.continues() ? tape.of_piece_before(state_out_) : ConstTensorView();
  if (context_ == nullptr) return {};
  const ConstTensorView state = tape.in(state_in_);
  return tape.sequence().links.continues() ? state : ConstTensorView();
}

// The gradient of the state after the piece, [1, heads, K, V]; empty when its last document ends here.
ConstTensorView KdaAttention::leaving_gradient(Tape& tape, ConstTensorView d_o) {
  const PieceLinks& links = tape.sequence().links;
  if (in_pieces_) return links.continued() ? tape.own(state_out_) : dfinal_states_;
  if (context_ == nullptr) return dfinal_states_;
  const ConstTensorView m = tape.in(state_m_);
  const Shape all = m.shape(), own{all[1], all[2], all[3]};
  const TensorView f = tape.temp(own, precision_.stats, "d attn.state, own"),
                   all_f = tape.temp(all, precision_.stats, "d attn.state, all pieces"),
                   leaving =
                       tape.temp({1, own[0], own[1], own[2]}, precision_.stats, "d attn.state");
  const ConstTensorView q = tape.in(q_), k = tape.in(k_), g = tape.in(g_decay_),
                        beta = tape.in(beta_);
  if (links.continues()) {
    tape.run(KdaSegmentGradient{.f = f,
                                .d_o = d_o,
                                .q = q,
                                .k = k,
                                .g = g,
                                .beta = beta,
                                .cu_seqlens = tape.sequence().cu});
  } else {
    tape.run(Fill{.y = f, .value = 0});
  }
  context_->gather(all_f, f, tape.stream());
  if (!links.continued()) return {};
  tape.run(KdaSegmentChain{.state = without_first_dim(leaving),
                           .m = m.rows(links.rank + 1, links.last + 1),
                           .e = all_f.rows(links.rank + 1, links.last + 1),
                           .reversed = true});
  return leaving;
}

}  // namespace moesaic
