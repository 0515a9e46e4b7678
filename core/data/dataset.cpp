#include "core/data/dataset.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/base/random.h"
#include "core/data/permutation.h"

namespace moesaic::data {

std::int64_t num_windows(const std::shared_ptr<const TokenSource>& source,
                         std::int64_t sequence_length) {
  if (source->keeps_documents_whole() || source->num_tokens() <= sequence_length)
    return make_windows(source, std::nullopt, sequence_length)->count();
  return (source->num_tokens() - 1) / sequence_length;  // without looking at the documents
}

namespace {

std::uint64_t key_of(std::string_view purpose, std::uint64_t seed, int phase, std::int64_t epoch) {
  std::uint64_t key = mix64(hash_name(purpose) ^ seed);
  key = mix64(key + 0x9e3779b97f4a7c15ULL * (static_cast<std::uint64_t>(phase) + 1));
  return mix64(key ^ static_cast<std::uint64_t>(epoch));
}

}  // namespace

SampleRange share_of_rank(std::int64_t first,
                          std::int64_t global_batch_size,
                          int rank,
                          int num_ranks) {
  MOESAIC_CHECK(0 <= rank && rank < num_ranks && first >= 0, "no such rank or sample");
  if (global_batch_size < 1 || global_batch_size % num_ranks != 0) {
    const std::int64_t below = global_batch_size / num_ranks * num_ranks;
    throw UsageError(
        fmt::format("train.global_batch_size = {} cannot be shared by {} data-parallel ranks; "
                    "nearest valid: {}",
                    global_batch_size,
                    num_ranks,
                    below > 0 ? fmt::format("{}, {}", below, below + num_ranks)
                              : fmt::format("{}", num_ranks)));
  }
  const std::int64_t count = global_batch_size / num_ranks;
  return {first + rank * count, count};
}

struct PackedDataset::Impl {
  struct Epoch {
    std::int64_t number;
    std::shared_ptr<const Windows> windows;
    KeyedPermutation order;
  };
  std::shared_ptr<const Epoch> epoch(std::int64_t number) {
    const std::lock_guard lock(mutex);
    auto& slot = kept[static_cast<std::size_t>(number % 2)];
    if (!slot || slot->number != number) {
      // Whole documents are packed once; a stream has another order of documents in every epoch.
      std::shared_ptr<const Windows> windows = whole;
      if (!windows)
        windows = make_windows(source, key_of("documents", seed, phase, number), sequence_length);
      slot = std::make_shared<const Epoch>(
          Epoch{number, std::move(windows), {count, key_of("windows", seed, phase, number)}});
    }
    return slot;
  }

  std::shared_ptr<const TokenSource> source;
  std::uint64_t seed;
  int phase;
  std::int64_t sequence_length;
  std::shared_ptr<const Windows> whole;
  std::int64_t count = 0;
  std::mutex mutex;
  std::array<std::shared_ptr<const Epoch>, 2> kept;
};

PackedDataset::PackedDataset(std::shared_ptr<const TokenSource> source,
                             std::uint64_t seed,
                             int phase,
                             std::int64_t sequence_length)
    : impl_(new Impl{std::move(source), seed, phase, sequence_length, nullptr, 0, {}, {}}) {
  if (impl_->source->keeps_documents_whole())
    impl_->whole = make_windows(impl_->source, std::nullopt, sequence_length);
  impl_->count = impl_->whole ? impl_->whole->count() : num_windows(impl_->source, sequence_length);
}
PackedDataset::~PackedDataset() = default;
std::int64_t PackedDataset::samples_per_epoch() const noexcept {
  return impl_->count;
}
std::int64_t PackedDataset::sequence_length() const noexcept {
  return impl_->sequence_length;
}

Batch PackedDataset::batch(SampleRange range) const {
  MOESAIC_CHECK(range.first >= 0, "negative sample index");
  Batch b = make_batch(impl_->sequence_length, range.count);
  for (std::int64_t g = range.first; g < range.first + range.count; ++g)
    append(g, b);
  return b;
}

void PackedDataset::append(std::int64_t sample, Batch& batch) const {
  MOESAIC_CHECK(sample >= 0, "negative sample index");
  const auto epoch = impl_->epoch(sample / impl_->count);
  epoch->windows->append(epoch->order(sample % impl_->count), batch);
}

ValidationSet::ValidationSet(std::shared_ptr<const TokenSource> source,
                             std::int64_t sequence_length,
                             std::int64_t num_samples)
    : sequence_length_(sequence_length),
      windows_(make_windows(std::move(source), std::nullopt, sequence_length)),
      num_samples_(std::min(num_samples, windows_->count())) {
  MOESAIC_CHECK(num_samples >= 1, "a validation set without samples");
}
ValidationSet::~ValidationSet() = default;
std::int64_t ValidationSet::num_samples() const noexcept {
  return num_samples_;
}

Batch ValidationSet::batch(SampleRange range) const {
  MOESAIC_CHECK(range.first >= 0 && range.first < num_samples_,
                "samples outside the validation set");
  Batch b = make_batch(sequence_length_, range.count);
  // Split into quotient and remainder, so that the product stays inside 64 bits.
  const std::int64_t step = windows_->count() / num_samples_,
                     rest = windows_->count() % num_samples_;
  const std::int64_t end = range.first + range.count;
  for (std::int64_t k = range.first; k < std::min(end, num_samples_); ++k)
    windows_->append(k * step + k * rest / num_samples_, b);
  for (std::int64_t k = num_samples_; k < end; ++k)
    append_filler(b, sequence_length_), ++b.num_samples;
  return b;
}

}  // namespace moesaic::data
