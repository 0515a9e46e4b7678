#pragma once
#include "core/nn/module.h"

namespace moesaic {

/// The table of word vectors [vocabulary, d]. Over Axis::tp each rank has a block of words: it looks up all tokens of the
/// micro-batch, words of other blocks giving 0, and each rank receives the sum for its own run of tokens.
class TokenEmbedding {
 public:
  /// `table`: this rank's rows.
  TokenEmbedding(StorageId table, const MeshPosition& position);
  StorageId table() const noexcept { return table_; }

  /// y [own tokens, d]; ids i32 [T], of all tokens where they are cut. `slices`: null where they are not.
  void forward(Tape& tape, const TokenSlices* slices, ConstTensorView ids, TensorView y) const;
  /// Adds to the rows that this rank has; dy [own tokens, d].
  void backward(Tape& tape,
                const TokenSlices* slices,
                ConstTensorView ids,
                ConstTensorView dy) const;

 private:
  StorageId table_;
  std::int64_t block_, blocks_;
};

}  // namespace moesaic
