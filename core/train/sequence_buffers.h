#pragma once
#include <cstdint>

#include "core/data/dataset.h"
#include "core/nn/sequence.h"
#include "memory/buffer.h"
#include "memory/stream.h"

namespace moesaic {

/// Device memory for one micro-batch of at most `most_tokens` tokens, filled from the data layer's batch.
class SequenceBuffers {
 public:
  SequenceBuffers(std::int64_t most_tokens, Device device, bool with_mtp);
  static std::size_t device_bytes(std::int64_t most_tokens) noexcept;
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
  Buffer host_, device_memory_;
  Sequence sequence_;
  std::int64_t num_mtp_targets_ = 0, num_valid_targets_ = 0;
};

}  // namespace moesaic
