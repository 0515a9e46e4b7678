#pragma once
#include <memory>

#include "core/model/indexer.h"
#include "core/model/options.h"
#include "core/nn/module.h"

namespace moesaic {

/// Multi-head latent attention (SPEC section 2), with or without query latent, rotation, output gate and a lightning
/// indexer that restricts every query to its top-k keys (SPEC section 3):
///
///   q = RMSNorm(x Wqa^T) Wqb^T or x Wq^T;   c = RMSNorm(x Wkva_c^T);   kr = x Wkva_r^T;   kn, v = c Wkvb^T
///   y = (softmax((dn+dr)^-1/2 <q, [kn; kr]>) v * sigma(x Wg^T)) Wo^T
///
/// With selected keys and SparseForm::gather the same by rows [c; kr] that all heads share: queries are mapped by the key
/// part of Wkvb, [Wuk^T qn; qr], and latent outputs by its value part. Per-head keys and values are formed all the same:
/// the indexer's target and the warm-up stage read them.
///
/// The heads are split over Axis::tp; latents, the shared key and what the indexer scores with are formed on every rank;
/// its choice and its loss are shared out by queries. The indexer's target sums over all heads: what it reads of them is
/// gathered.
///
/// Where a sequence is cut along Axis::cp (Bounds::context) the queries stay where they are; latents, shared keys and the
/// indexer's keys are gathered, per-head keys and values formed of all tokens up to the end of a rank's own piece, and the
/// gradients of latents and keys summed back in rank order.
///
/// Of pieces one after the other (Bounds::pieces) each keeps its latents and keys, and gathers those of the pieces before
/// it from their tapes. Their gradients are added up over the pieces, from the last to the first, in RunContext::piece_sums:
/// when a piece's backward comes, its own are complete.
class MlaAttention : public Module {
 public:
  MlaAttention(ParameterStore& params, const std::string& prefix, const MlaOptions& options);
  void declare(TapeSpec& tape, const Bounds& bounds, ActId x, ActId y) override;
  void backward(Tape& tape, ConstTensorView dy, TensorView dx) override;

  /// Sparse stage: attention over selected keys (the default with an indexer). Warm-up: dense attention, the indexer
  /// learns over all visible keys.
  void set_sparse(bool sparse) { sparse_ = sparse; }
  Indexer* indexer() noexcept { return indexer_.get(); }
  BufferId max_logit() const noexcept { return max_logit_; }  ///< [H], of the step (QK-clip)
  /// [heads here], the part of it that this rank's heads have.
  TensorView max_logit_here(const ParameterStore& params) const {
    return params.buffer(max_logit_).rows(first_head_, first_head_ + options_.heads);
  }
  /// heads: those of this rank.
  const MlaOptions& options() const noexcept { return options_; }
  /// Names of the two matrices that QK-clip scales.
  const std::string& query_matrix() const noexcept { return query_matrix_; }
  const std::string& key_value_matrix() const noexcept { return key_value_matrix_; }
  ActId lse() const noexcept { return lse_; }
  /// Bytes of RunContext::piece_sums that backward needs, of the micro-batches declared last.
  std::size_t piece_sum_bytes() const;

 private:
  void declare_query(TapeSpec& tape, std::int64_t tokens);
  void declare_key_value(TapeSpec& tape, std::int64_t tokens);
  void declare_latent(TapeSpec& tape, std::int64_t tokens);
  void declare_attention(TapeSpec& tape, std::int64_t tokens, ActId y);
  void attend(Tape& tape);
  void attend_latent(Tape& tape);
  TensorView backward_gate(Tape& tape, ConstTensorView dy, TensorView dx);
  /// Gradients of what attention read: the query [T, H, dn + dr], the normed latent and the shared key; these two are rows
  /// of those of all tokens.
  struct InputGradients {
    TensorView dq, dc, dkr, all_dc, all_dkr;
  };
  void declare_all_keys(TapeSpec& tape, std::int64_t tokens);
  /// Rows of what was gathered that the queries of this pass may see; empty for none.
  ConstTensorView keys(Tape& tape, ActId all) const;
  std::int64_t keys_of(const Tape& tape) const { return visible_keys(tape, pieces_, keys_); }
  void sum_key_gradients(Tape& tape, InputGradients& g) const;
  void add_piece_gradients(Tape& tape, InputGradients& g) const;
  std::size_t sum_bytes(std::int64_t width) const;
  /// Backward of the indexer, with what it reads of all heads.
  void backward_indexer(Tape& tape);
  ConstTensorView all_heads(Tape& tape, ConstTensorView own, const char* tag) const;
  InputGradients take_gradients(Tape& tape);
  InputGradients backward_attention(Tape& tape, ConstTensorView d_o);
  InputGradients backward_latent(Tape& tape, ConstTensorView d_o);
  void backward_projections(Tape& tape, const InputGradients& g, TensorView dx);
  void backward_query(Tape& tape, TensorView dq, TensorView dx);
  /// Whether this pass gathers.
  bool gathers() const { return may_gather_ && sparse_; }
  double scale() const;
  std::int64_t qk_dim() const { return options_.qk_nope_dim + options_.qk_rope_dim; }
  void rotate(Tape& tape, TensorView x, std::int64_t begin, bool inverse) const;

  MlaOptions options_;  // heads: of this rank
  std::int64_t first_head_ = 0;
  // Of the micro-batches declared last.
  const TokenSlices* slices_ = nullptr;
  const TokenSlices* context_ = nullptr;
  std::int64_t pieces_ = 1;
  std::int64_t keys_ = 0;  // bound
  Precision precision_;
  std::string query_matrix_, key_value_matrix_;
  StorageId q_a_, q_a_norm_, q_b_, kv_a_, kv_a_norm_, kv_b_, g_, o_proj_;
  BufferId max_logit_;
  std::unique_ptr<Indexer> indexer_;
  bool sparse_ = true;
  bool may_gather_ = false;  ///< in the sparse stage, for the size that was declared
  ActId all_c_, all_kr_;     // c_ and kr_ of all pieces along Axis::cp
  ActId x_, qa_raw_, qa_, qa_inv_rms_, query_, c_raw_, c_, c_inv_rms_, kr_, kvb_, o_, lse_, gate_,
      gated_;
  ActId kv_, q_latent_, o_latent_;  // of the gather form
};

}  // namespace moesaic
