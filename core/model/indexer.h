#pragma once
#include "core/model/options.h"
#include "core/nn/module.h"

namespace moesaic {

/// Keys that the queries of the tape's piece may see: `bound` of them, or, of several pieces one after the other, those up to
/// its end.
std::int64_t visible_keys(const Tape& tape, std::int64_t pieces, std::int64_t bound);
/// What pieces one after the other give the keys they see: adds `all` [keys, width] (compute type), the part of the tape's
/// piece, to `sums` [keys of all pieces, width] (gradient type); the last piece comes first and begins the sums. Returns the
/// rows of the tape's piece, complete now, in the compute type.
TensorView add_piece_gradient(Tape& tape, TensorView sums, ConstTensorView all, const char* tag);

/// Lightning indexer of top-k sparse attention (SPEC section 3): small heads score every visible key, the k best are
/// attended to. Its inputs are detached: the language model's loss never reaches it, and its own objective
/// KL(attention probabilities || softmax of scores) reaches nothing else.
class Indexer {
 public:
  Indexer(ParameterStore& params, const std::string& prefix, const MlaOptions& mla);
  /// Declares scores' inputs and the choice of keys from the layer input `x` and the query latent `qa` (invalid: none).
  void declare(TapeSpec& tape, const Bounds& bounds, ActId x, ActId qa);
  /// i32 [T, k], ascending, -1 = none.
  ActId selected() const noexcept { return selected_; }

  /// What the objective reads of the attention.
  struct Attention {
    ConstTensorView q, kvb, kr, lse;
    std::int64_t qk_nope_dim = 0;
    double scale = 1;
  };
  /// Bytes that backward takes of RunContext::piece_sums.
  std::size_t piece_sum_bytes() const;
  /// Adds the KL to the losses and its gradient to the indexer's parameters. `sparse`: over the selected keys only. The ranks
  /// along Axis::tp share the queries: each adds what its own run of them gives. `sums`: u8 [piece_sum_bytes()].
  void backward(Tape& tape, const Attention& attention, bool sparse, TensorView sums);

  void set_given(ConstTensorView given) { given_ = given; }
  /// Tests: [T, T] scores are written here by forward; empty = not wanted.
  void set_scores(TensorView scores) { scores_ = scores; }

 private:
  void rotate(Tape& tape, TensorView x, bool inverse) const;
  /// The choice of keys; the ranks along Axis::tp share the queries, pairs of ranks along Axis::cp even them out.
  void select(Tape& tape) const;
  void select_shared(Tape& tape,
                     ConstTensorView q,
                     ConstTensorView k,
                     ConstTensorView w,
                     TensorView selected) const;
  /// All of them where tokens are not cut.
  RowRange own_queries(std::int64_t tokens) const;
  TensorView own_key_gradient(Tape& tape, TensorView all, TensorView sums) const;
  std::int64_t keys_of(const Tape& tape) const { return visible_keys(tape, pieces_, keys_); }

  std::string prefix_;
  IndexerOptions options_;
  bool rope_ = false;
  double rope_theta_ = 10000.0;
  Precision precision_;
  StorageId wq_b_, wk_, k_norm_weight_, k_norm_bias_, weights_proj_;
  // Of the micro-batches declared last.
  const TokenSlices* slices_ = nullptr;
  const TokenSlices* context_ = nullptr;
  std::int64_t pieces_ = 1;
  std::int64_t keys_ = 0;  // bound
  ActId all_k_;            // of all pieces
  ActId x_, qa_, q_, k_raw_, k_, k_mean_, k_inv_std_, w_, selected_;
  ConstTensorView given_;
  TensorView scores_;
};

}  // namespace moesaic
