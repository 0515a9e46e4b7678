#pragma once
#include <cstdint>

#include "core/base/tensor.h"
#include "core/data/dataset.h"
#include "core/nn/context_piece.h"
#include "core/nn/sequence.h"
#include "memory/stream.h"

namespace moesaic {

/// A micro-batch of at most `most_tokens` tokens on the device, filled from the data layer's batch; or one of the equal
/// contiguous pieces that the ranks along Axis::cp cut it into, or that a rank works off one after the other.
class SequenceBuffers {
 public:
  /// Which of how many pieces.
  struct Piece {
    int index = 0, count = 1;
    bool in_turn = false;  ///< one after the other on one rank: queries are not lent
  };
  /// `host`, `device`: bytes_for(most_tokens, piece.count) bytes each, which outlive this. `most_tokens`: of the whole.
  SequenceBuffers(
      std::int64_t most_tokens, TensorView host, TensorView device, bool with_mtp, Piece piece);
  SequenceBuffers(std::int64_t most_tokens, TensorView host, TensorView device, bool with_mtp)
      : SequenceBuffers(most_tokens, host, device, with_mtp, Piece()) {}
  static std::size_t bytes_for(std::int64_t most_tokens, int pieces = 1) noexcept;
  /// Copies in stream order; the host side is kept here until the next load(), which must come after the stream has
  /// passed this one. `batch` is whole.
  void load(const data::Batch& batch, Stream& stream);
  const Sequence& sequence() const noexcept { return sequence_; }
  // Of the last load, here; over all pieces they add up to those of the whole.
  std::int64_t mtp_targets() const noexcept { return num_mtp_targets_; }
  std::int64_t valid_targets() const noexcept { return num_valid_targets_; }
  /// Those that begin here.
  std::int64_t documents() const noexcept {
    return sequence_.num_documents() - (sequence_.links.continues() ? 1 : 0);
  }

 private:
  bool with_mtp_;
  std::int64_t most_tokens_;
  Piece piece_;
  TensorView host_, device_;  // [bytes / 4] i32
  Sequence sequence_;
  std::int64_t num_mtp_targets_ = 0, num_valid_targets_ = 0;
};

}  // namespace moesaic
