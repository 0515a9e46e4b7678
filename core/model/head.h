#pragma once
#include "core/nn/losses.h"
#include "core/nn/module.h"

namespace moesaic {

/// The vocabulary head with its loss: logits = n W^T, cross-entropy against targets, and in training the gradients of n
/// and W at once, in chunks of rows, so that the logits of a micro-batch never exist together.
///
/// Over Axis::tp each rank has a block of words. A chunk is then an equal run of every rank's tokens: their n is gathered,
/// each rank forms the logits of its words, two numbers a row are exchanged (kernels/ops/vocab_block.h), and each rank
/// receives the sum of dn for its own tokens. The loss of a token is counted by the rank that has its target.
class VocabHead {
 public:
  /// `weight`: this rank's rows of [vocabulary, d]. `chunk_rows`: rows of logits held at a time; 0 = chosen.
  VocabHead(StorageId weight,
            std::int64_t vocabulary,
            std::int64_t chunk_rows,
            const MeshPosition& position);

  struct Target {
    ConstTensorView targets;  ///< i32 [T], of all tokens where they are cut
    ConstTensorView divisor;  ///< scalar
    TensorView loss_sum;      ///< scalar, accumulates
    double scale = 1.0;       ///< of the gradient
  };
  /// n [own tokens, d]; dn alike is overwritten with scale / divisor times the gradient; empty = loss only. `slices`: null
  /// where tokens are not cut.
  void loss(Tape& tape,
            const TokenSlices* slices,
            ConstTensorView n,
            const Target& target,
            TensorView dn) const;
  /// logp [T] (statistics type): log-probability of each target, 0 where the target is kIgnoredTarget. In chunks of rows,
  /// as loss(). This and logits() are for a head that is whole.
  void log_probabilities(RunContext& context,
                         ConstTensorView n,
                         ConstTensorView targets,
                         TensorView logp) const;
  /// Plain logits of a few rows (generation): out [rows, vocabulary], statistics type.
  void logits(RunContext& context, ConstTensorView n, TensorView out) const;
  std::int64_t vocabulary() const noexcept { return vocabulary_; }

 private:
  void loss_of_whole(Tape& tape, ConstTensorView n, const Target& target, TensorView dn) const;
  void loss_of_block(Tape& tape,
                     const TokenSlices& slices,
                     ConstTensorView own_n,
                     const Target& target,
                     TensorView own_dn) const;
  std::int64_t words() const { return vocabulary_ / blocks_; }  // of this rank

  StorageId weight_;
  std::int64_t vocabulary_, block_, blocks_, chunk_rows_;
};

}  // namespace moesaic
