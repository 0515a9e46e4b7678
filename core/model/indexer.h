#pragma once
#include "core/model/options.h"
#include "core/nn/module.h"

namespace moesaic {

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
  /// Adds the KL to the losses and its gradient to the indexer's parameters. `sparse`: over the selected keys only. The ranks
  /// along Axis::tp share the queries: each adds what its own run of them gives.
  void backward(Tape& tape, const Attention& attention, bool sparse);

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
  TensorView own_key_gradient(Tape& tape, TensorView all) const;

  std::string prefix_;
  IndexerOptions options_;
  bool rope_ = false;
  double rope_theta_ = 10000.0;
  Precision precision_;
  StorageId wq_b_, wk_, k_norm_weight_, k_norm_bias_, weights_proj_;
  // Of the micro-batches declared last.
  const TokenSlices* slices_ = nullptr;
  const TokenSlices* context_ = nullptr;
  std::int64_t keys_ = 0;
  ActId all_k_;  // of all pieces along Axis::cp
  ActId x_, qa_, q_, k_raw_, k_, k_mean_, k_inv_std_, w_, selected_;
  ConstTensorView given_;
  TensorView scores_;
};

}  // namespace moesaic
