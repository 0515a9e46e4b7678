#pragma once
#include "core/nn/losses.h"
#include "core/nn/module.h"

namespace moesaic {

/// The vocabulary head with its loss: logits = n W^T, cross-entropy against targets, and in training the gradients of n
/// and W at once, in chunks of rows, so that the logits of a micro-batch never exist together.
class VocabHead {
 public:
  VocabHead(StorageId weight, std::int64_t vocabulary, std::int64_t chunk_rows);

  struct Target {
    ConstTensorView targets;  ///< i32 [T]
    ConstTensorView divisor;  ///< scalar
    TensorView loss_sum;      ///< scalar, accumulates
    double scale = 1.0;       ///< of the gradient
  };
  /// dn [T, d] is overwritten with scale / divisor times the gradient; empty = loss only.
  void loss(Tape& tape, ConstTensorView n, const Target& target, TensorView dn) const;
  /// logp [T] (statistics type): log-probability of each target, 0 where the target is kIgnoredTarget. In chunks of rows,
  /// as loss().
  void log_probabilities(RunContext& context,
                         ConstTensorView n,
                         ConstTensorView targets,
                         TensorView logp) const;
  /// Plain logits of a few rows (generation): out [rows, vocabulary], statistics type.
  void logits(RunContext& context, ConstTensorView n, TensorView out) const;
  std::int64_t vocabulary() const noexcept { return vocabulary_; }

 private:
  StorageId weight_;
  std::int64_t vocabulary_, chunk_rows_;
};

}  // namespace moesaic
