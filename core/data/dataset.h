#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "core/data/batch.h"
#include "core/data/token_source.h"
#include "core/data/windows.h"

namespace moesaic::data {

/// Windows of `sequence_length` tokens in one epoch of a source. Throws InputError when there is none.
std::int64_t num_windows(const std::shared_ptr<const TokenSource>& source,
                         std::int64_t sequence_length);

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

/// Training samples without end, in epochs.
///
/// Epoch e cuts the source into W windows, a stream in an order of documents keyed by (seed, phase, e) or packed whole
/// documents (windows.h), and deals the windows in a second keyed order. Sample g is window order_e(g mod W) of epoch e = g
/// div W: a pure function of (source, seed, phase, T, g). Keeps the windows of the last two epochs. Usable from several
/// threads.
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
  /// Adds one sample to a batch of the same sequence length.
  void append(std::int64_t sample, Batch& batch) const;

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
  std::int64_t sequence_length_;
  std::unique_ptr<Windows> windows_;
  std::int64_t num_samples_;
};

}  // namespace moesaic::data
