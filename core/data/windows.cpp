#include "core/data/windows.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"

namespace moesaic::data {

CutWindows::CutWindows(std::shared_ptr<const TokenSource> source,
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
}

void CutWindows::append(std::int64_t window, Batch& batch) const {
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

// Tokens of the stream from `at` on; ends[i] = 1 where token i is the last of its document.
void CutWindows::read(std::int64_t at, std::span<std::int32_t> out, std::span<char> ends) const {
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

}  // namespace moesaic::data
