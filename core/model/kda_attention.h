#pragma once
#include "core/model/options.h"
#include "core/nn/module.h"

namespace moesaic {

/// Kimi Delta Attention layer (SPEC 1.1):
///
///   q', k', v = silu(conv(x W^T));  q = L2(q') K^-1/2, k = L2(k');  beta = sigma(x Wb^T);  g = gate((x Wfa^T) Wfb^T)
///   o = gated delta rule(q, k, v, g, beta);  y = (RMSNorm_head(o) * sigma(G)) Wo^T
///   G = x Wg^T (full rank) or (x Wga^T) Wgb^T
///
/// The heads are split over Axis::tp; what all heads share (A_log, o_norm, inner gate projections) is on every rank. Where a
/// sequence is cut along Axis::cp (Bounds::context), the convolutions get their first rows from the rank before and the
/// recurrence its first state from the affine maps of the pieces before (SPEC 1.8). Of pieces one after the other
/// (Bounds::pieces) each finds both in the tape of the one before, and leaves their gradients there in backward.
class KdaAttention : public Module {
 public:
  KdaAttention(ParameterStore& params, const std::string& prefix, const KdaOptions& options);
  void declare(TapeSpec& tape, const Bounds& bounds, ActId x, ActId y) override;
  void backward(Tape& tape, ConstTensorView dy, TensorView dx) override;

  /// Where forward writes the final states [N, H, K, V] (statistics type); empty = not wanted. Their gradient for the
  /// next backward; empty = zero. Documents start from zero states here; the op also takes initial ones.
  void set_states(TensorView final_states, ConstTensorView dfinal_states) {
    final_states_ = final_states;
    dfinal_states_ = dfinal_states;
  }

 private:
  void declare_projections(TapeSpec& tape, std::int64_t tokens);
  // Along Axis::cp, or of pieces one after the other, in kda_context.cpp.
  void declare_halo(TapeSpec& tape, std::int64_t channels);
  void declare_tail(TapeSpec& tape, std::int64_t channels);
  void fill_tail(Tape& tape, TensorView tail) const;
  void declare_states(TapeSpec& tape);
  ConstTensorView history(Tape& tape, int i) const;
  ConstTensorView entering_state(Tape& tape) const;
  ConstTensorView leaving_gradient(Tape& tape, ConstTensorView d_o);
  /// Whether backward finds gradients of the first state and of the rows before the piece.
  bool returns_gradients(const Tape& tape) const {
    return in_pieces_ && tape.sequence().links.continues();
  }
  void return_halo(Tape& tape, ConstTensorView dhalo, const TensorView (&draw)[3]) const;
  void add_to_tail(Tape& tape, ConstTensorView from_next, const TensorView (&draw)[3]) const;
  void declare_core(TapeSpec& tape, std::int64_t tokens);
  void declare_output(TapeSpec& tape, std::int64_t tokens, ActId y);
  TensorView backward_output(Tape& tape, ConstTensorView dy, TensorView dx);
  void backward_core(Tape& tape, ConstTensorView d_o, TensorView dx);
  /// This rank's part of A_log, which all ranks hold whole: its entries may be more than the heads.
  template <class View>
  View own_heads(View a_log) const {
    if (a_log.empty()) return a_log;
    return a_log.reshaped({a_log.numel()}).rows(first_head_, first_head_ + options_.heads);
  }
  Shape rows_before_shape() const {
    return {3, options_.conv_kernel - 1, options_.heads * options_.head_dim};
  }
  Shape heads3(std::int64_t tokens) const { return {tokens, options_.heads, options_.head_dim}; }

  KdaOptions options_;  // heads: of this rank
  std::int64_t first_head_ = 0;
  Precision precision_;
  // q, k, v share their code: index 0, 1, 2.
  struct Stream3 {
    StorageId proj, conv;
    ActId raw, out;
  };
  Stream3 qkv_[3];
  StorageId f_a_, f_b_, b_proj_, a_log_, dt_bias_, g_, g_a_, g_b_, o_norm_, o_proj_;
  ActId x_, f_inner_, z_, beta_logit_, q_, k_, g_decay_, beta_, q_rstd_, k_rstd_, o_, gate_inner_,
      gate_, normed_, inv_rms_;
  const TokenSlices* context_ = nullptr;  // of the micro-batches declared last
  ActId halo_;                            // [3, taps - 1, channels]
  ActId state_m_, state_e_, state_in_;
  bool in_pieces_ = false;  // one after the other
  ActId tail_, state_out_;  // what the next piece begins with; in backward, their gradients
  TensorView final_states_;
  ConstTensorView dfinal_states_;
};

}  // namespace moesaic
