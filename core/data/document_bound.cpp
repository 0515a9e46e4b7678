#include "core/data/document_bound.h"

#include <algorithm>

namespace moesaic::data {
namespace {
// Enough for any micro-batch; beyond, documents count as long as the last one.
constexpr std::int64_t kMostTokens = std::int64_t{1} << 26;
}  // namespace

DocumentBound::DocumentBound(const TokenSource& source) {
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(source.num_documents()));
  for (std::size_t d = 0; d < lengths.size(); ++d)
    tokens_ += lengths[d] = source.document_length(static_cast<std::int64_t>(d));
  std::sort(lengths.begin(), lengths.end());
  std::int64_t sum = 0;
  for (const std::int64_t length : lengths) {
    next_length_ = length;
    if (sum >= kMostTokens) break;
    shortest_.push_back(sum += length);
  }
}

DocumentBound::DocumentBound(std::int64_t least) : next_length_(std::max<std::int64_t>(1, least)) {}

// The most that fit when the shortest come first.
std::int64_t DocumentBound::whole_in(std::int64_t tokens) const {
  const auto end = std::upper_bound(shortest_.begin(), shortest_.end(), tokens);
  const auto count = static_cast<std::int64_t>(end - shortest_.begin());
  if (end != shortest_.end() || (tokens_ > 0 && tokens >= tokens_)) return count;
  const std::int64_t used = shortest_.empty() ? 0 : shortest_.back();
  return count + (tokens - used) / next_length_;
}

std::int64_t DocumentBound::in(std::int64_t samples, std::int64_t sequence_length) const {
  const std::int64_t tokens = samples * sequence_length;
  // The windows of one epoch share no document but cut ones; a batch may lie across the border of epochs.
  const std::int64_t windows =
      tokens_ == 0 ? samples : std::max<std::int64_t>(1, (tokens_ - 1) / sequence_length);
  const std::int64_t epochs = tokens_ == 0 ? 1 : std::min(samples, samples / windows + 2);
  // Every window cuts at most one document at each end.
  return std::min(tokens, epochs * whole_in(tokens) + 2 * samples);
}

}  // namespace moesaic::data
