#pragma once
#include <cstdint>

#include "core/base/tensor.h"
#include "core/data/dataset.h"
#include "core/nn/sequence.h"
#include "memory/stream.h"

namespace moesaic {

/// A micro-batch of at most `most_tokens` tokens on the device, filled from the data layer's batch.
class SequenceBuffers {
 public:
  /// `host`, `device`: bytes_for(most_tokens) bytes each, which outlive this.
  SequenceBuffers(std::int64_t most_tokens, TensorView host, TensorView device, bool with_mtp);
  static std::size_t bytes_for(std::int64_t most_tokens) noexcept;
  /// Copies in stream order; the host side is kept here until the next load(), which must come after the stream has
  /// passed this one.
  void load(const data::Batch& batch, Stream& stream);
  const Sequence& sequence() const noexcept { return sequence_; }
  std::int64_t mtp_targets() const noexcept {
    return num_mtp_targets_;
  }  ///< valid ones of the last load
  std::int64_t valid_targets() const noexcept { return num_valid_targets_; }
  std::int64_t documents() const noexcept { return sequence_.num_documents(); }

 private:
  bool with_mtp_;
  std::int64_t most_tokens_;
  TensorView host_, device_;  // [bytes / 4] i32
  Sequence sequence_;
  std::int64_t num_mtp_targets_ = 0, num_valid_targets_ = 0;
};

}  // namespace moesaic
