#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "core/data/token_source.h"

namespace moesaic::data {

/// Some windows of `sequence_length` tokens as one packed sequence of T = num_samples *
/// sequence_length.
///
/// labels[t] is the token after tokens[t], or kIgnoredLabel where that would be the first token of
/// another document. `cu` = document boundaries, 0 = cu[0] < … < cu[N] = T: a document starts at
/// every sample's first token and after the last token of the one before.
struct Batch {
  std::int64_t num_samples = 0;
  std::int64_t sequence_length = 0;
  std::vector<std::int32_t> tokens;     ///< [T]
  std::vector<std::int32_t> labels;     ///< [T]
  std::vector<std::int32_t> positions;  ///< [T], from 0 at every document boundary
  std::vector<std::int32_t> cu;         ///< [N + 1]
  std::int64_t valid_labels = 0;        ///< how many labels are not kIgnoredLabel
};

/// Samples [first, first + count) of a phase.
struct SampleRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
};
/// The contiguous share of `rank` in the global batch that starts at sample `first`. Sample indices
/// do not depend on the number of ranks. Throws UsageError when the ranks do not divide the batch.
SampleRange share_of_rank(std::int64_t first,
                          std::int64_t global_batch_size,
                          int rank,
                          int num_ranks);

/// The token stream of a source in one order of its documents, cut into windows: window w holds
/// tokens [w T, w T + T] of the stream, so that neighbouring windows share one token, which is a
/// label in the first and an input in the second.
class DocumentStream;

/// Training samples without end, in epochs.
///
/// Epoch e concatenates all documents in an order keyed by (seed, phase, e), cuts the stream into W
/// = (tokens - 1) / T windows (the rest, fewer than T labels, is left out), and deals the windows
/// in a second keyed order. Sample g is window order_e(g mod W) of epoch e = g div W: a pure
/// function of (source, seed, phase, T, g). Needs one pass over the lengths per epoch and 8 bytes
/// for every 64 documents, kept for the last two epochs. Usable from several threads.
class PackedDataset {
 public:
  /// Throws InputError when the source is shorter than one window.
  PackedDataset(std::shared_ptr<const TokenSource> source,
                std::uint64_t seed,
                int phase,
                std::int64_t sequence_length);
  ~PackedDataset();
  PackedDataset(const PackedDataset&) = delete;
  PackedDataset& operator=(const PackedDataset&) = delete;

  std::int64_t samples_per_epoch() const noexcept;
  std::int64_t sequence_length() const noexcept;
  Batch batch(SampleRange range) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A fixed set of windows: file order, spread evenly over the source; the same ones in every run.
class ValidationSet {
 public:
  /// `num_samples` is cut to what the source holds. Throws InputError when that is none.
  ValidationSet(std::shared_ptr<const TokenSource> source,
                std::int64_t sequence_length,
                std::int64_t num_samples);
  ~ValidationSet();
  ValidationSet(const ValidationSet&) = delete;
  ValidationSet& operator=(const ValidationSet&) = delete;

  std::int64_t num_samples() const noexcept;
  /// Samples beyond the last are documents of one token value without labels: every batch has the same size.
  Batch batch(SampleRange range) const;

 private:
  std::unique_ptr<DocumentStream> stream_;
  std::int64_t num_samples_ = 0;
};

}  // namespace moesaic::data
