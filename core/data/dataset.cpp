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

class DocumentStream {
 public:
  /// Without a key: file order.
  DocumentStream(std::shared_ptr<const TokenSource> source,
                 std::optional<std::uint64_t> key,
                 std::int64_t sequence_length)
      : source_(std::move(source)), sequence_length_(sequence_length) {
    MOESAIC_CHECK(sequence_length >= 1, "sequence length below 1");
    const std::int64_t documents = source_->num_documents();
    if (key && documents > 0) order_.emplace(documents, *key);
    for (std::int64_t i = 0; i < documents; ++i) {
      if (i % kStride == 0) start_.push_back(tokens_);
      tokens_ += source_->document_length(document(i));
    }
    if (num_windows() < 1) {
      throw InputError(
          fmt::format("{}: {} tokens in {} documents, fewer than one window of "
                      "data.sequence_length + 1 = {}; use more text or shorter sequences",
                      source_->name(),
                      tokens_,
                      documents,
                      sequence_length + 1));
    }
  }
  std::int64_t sequence_length() const noexcept { return sequence_length_; }
  std::int64_t num_windows() const noexcept { return (tokens_ - 1) / sequence_length_; }

  void append(std::int64_t window, Batch& batch) const {
    const auto length = static_cast<std::size_t>(sequence_length_);
    std::vector<std::int32_t> text(length + 1);
    std::vector<char> ends(length + 1, 0);
    read(window * sequence_length_, text, ends);
    const auto first = static_cast<std::int32_t>(batch.tokens.size());
    std::int32_t position = 0;
    for (std::size_t t = 0; t < length; ++t) {
      batch.tokens.push_back(text[t]);
      batch.labels.push_back(ends[t] ? kIgnoredLabel : text[t + 1]);
      batch.positions.push_back(position);
      batch.valid_labels += ends[t] ? 0 : 1;
      position = ends[t] ? 0 : position + 1;
      if (ends[t] || t + 1 == length) batch.cu.push_back(first + static_cast<std::int32_t>(t) + 1);
    }
    ++batch.num_samples;
  }

 private:
  // One prefix sum for so many documents: little memory for millions of them, few steps to find one.
  static constexpr std::int64_t kStride = 64;

  std::int64_t document(std::int64_t place) const { return order_ ? (*order_)(place) : place; }
  // Tokens of the stream from `at` on; ends[i] = 1 where token i is the last of its document.
  void read(std::int64_t at, std::span<std::int32_t> out, std::span<char> ends) const {
    const auto block = std::upper_bound(start_.begin(), start_.end(), at) - start_.begin() - 1;
    std::int64_t place = block * kStride;
    std::int64_t inside = at - start_[static_cast<std::size_t>(block)];
    for (; !out.empty(); ++place) {
      const std::int64_t length = source_->document_length(document(place));
      if (inside >= length) {
        inside -= length;
        continue;
      }
      const auto count = static_cast<std::size_t>(
          std::min<std::int64_t>(length - inside, static_cast<std::int64_t>(out.size())));
      source_->read(document(place), inside, out.first(count));
      if (inside + static_cast<std::int64_t>(count) == length) ends[count - 1] = 1;
      out = out.subspan(count);
      ends = ends.subspan(count);
      inside = 0;
    }
  }

  std::shared_ptr<const TokenSource> source_;
  std::int64_t sequence_length_;
  std::optional<KeyedPermutation> order_;
  std::vector<std::int64_t> start_;  // of every kStride-th document in the stream
  std::int64_t tokens_ = 0;
};

namespace {

Batch empty_batch(std::int64_t sequence_length, std::int64_t count) {
  MOESAIC_CHECK(count >= 0 && count <= INT32_MAX / sequence_length,
                "a batch of more than 2^31 tokens");
  Batch b;
  b.sequence_length = sequence_length;
  b.cu.push_back(0);
  for (auto* v : {&b.tokens, &b.labels, &b.positions})
    v->reserve(static_cast<std::size_t>(count * sequence_length));
  return b;
}

void append_filler(Batch& b) {
  const auto length = static_cast<std::size_t>(b.sequence_length);
  b.tokens.insert(b.tokens.end(), length, 0);
  b.labels.insert(b.labels.end(), length, kIgnoredLabel);
  for (std::size_t t = 0; t < length; ++t)
    b.positions.push_back(static_cast<std::int32_t>(t));
  b.cu.push_back(static_cast<std::int32_t>(b.tokens.size()));
  ++b.num_samples;
}

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
    DocumentStream stream;
    KeyedPermutation windows;
  };
  std::shared_ptr<const Epoch> epoch(std::int64_t number) {
    const std::lock_guard lock(mutex);
    auto& slot = kept[static_cast<std::size_t>(number % 2)];
    if (!slot || slot->number != number) {
      DocumentStream stream(source, key_of("documents", seed, phase, number), sequence_length);
      const auto n = stream.num_windows();
      slot = std::make_shared<const Epoch>(
          Epoch{number, std::move(stream), {n, key_of("windows", seed, phase, number)}});
    }
    return slot;
  }

  std::shared_ptr<const TokenSource> source;
  std::uint64_t seed;
  int phase;
  std::int64_t sequence_length;
  std::int64_t windows = 0;
  std::mutex mutex;
  std::array<std::shared_ptr<const Epoch>, 2> kept;
};

PackedDataset::PackedDataset(std::shared_ptr<const TokenSource> source,
                             std::uint64_t seed,
                             int phase,
                             std::int64_t sequence_length)
    : impl_(new Impl{std::move(source), seed, phase, sequence_length, 0, {}, {}}) {
  impl_->windows = impl_->epoch(0)->stream.num_windows();
}
PackedDataset::~PackedDataset() = default;
std::int64_t PackedDataset::samples_per_epoch() const noexcept {
  return impl_->windows;
}
std::int64_t PackedDataset::sequence_length() const noexcept {
  return impl_->sequence_length;
}

Batch PackedDataset::batch(SampleRange range) const {
  MOESAIC_CHECK(range.first >= 0, "negative sample index");
  Batch b = empty_batch(impl_->sequence_length, range.count);
  for (std::int64_t g = range.first; g < range.first + range.count; ++g) {
    const auto epoch = impl_->epoch(g / impl_->windows);
    epoch->stream.append(epoch->windows(g % impl_->windows), b);
  }
  return b;
}

ValidationSet::ValidationSet(std::shared_ptr<const TokenSource> source,
                             std::int64_t sequence_length,
                             std::int64_t num_samples)
    : stream_(std::make_unique<DocumentStream>(std::move(source), std::nullopt, sequence_length)),
      num_samples_(std::min(num_samples, stream_->num_windows())) {
  MOESAIC_CHECK(num_samples >= 1, "a validation set without samples");
}
ValidationSet::~ValidationSet() = default;
std::int64_t ValidationSet::num_samples() const noexcept {
  return num_samples_;
}

Batch ValidationSet::batch(SampleRange range) const {
  MOESAIC_CHECK(range.first >= 0 && range.first < num_samples_,
                "samples outside the validation set");
  Batch b = empty_batch(stream_->sequence_length(), range.count);
  // Split into quotient and remainder, so that the product stays inside 64 bits.
  const std::int64_t step = stream_->num_windows() / num_samples_,
                     rest = stream_->num_windows() % num_samples_;
  const std::int64_t end = range.first + range.count;
  for (std::int64_t k = range.first; k < std::min(end, num_samples_); ++k)
    stream_->append(k * step + k * rest / num_samples_, b);
  for (std::int64_t k = num_samples_; k < end; ++k)
    append_filler(b);
  return b;
}

}  // namespace moesaic::data
