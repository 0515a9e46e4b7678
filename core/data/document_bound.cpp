#include "core/data/document_bound.h"

#include <algorithm>
#include <map>

namespace moesaic::data {
namespace {

constexpr std::int64_t kNoLimit = std::int64_t{1} << 40;

// Lengths below 2^16 one by one, then by sixteenths of a power of two: at most 70,000 entries for any source.
std::int64_t rounded_down(std::int64_t length) {
  std::int64_t step = 1;
  while (length / step >= (std::int64_t{1} << 16))
    step *= 2;
  return step == 1 ? length : length / (step << 12) * (step << 12);
}

}  // namespace

DocumentBound::DocumentBound(const TokenSource& source) {
  const TokenSource* one = &source;
  *this = DocumentBound(std::span<const TokenSource* const>(&one, 1));
}

DocumentBound::DocumentBound(std::span<const TokenSource* const> sources) {
  std::map<std::int64_t, std::int64_t> count;
  for (const TokenSource* source : sources) {
    std::int64_t& sum = tokens_.emplace_back(0);
    for (std::int64_t d = 0; d < source->num_documents(); ++d) {
      const std::int64_t length = source->document_length(d);
      if (length == 0) continue;
      sum += length;
      ++count[rounded_down(length)];
    }
  }
  documents_.assign(count.begin(), count.end());
}

DocumentBound::DocumentBound(std::int64_t least)
    : documents_{{std::max<std::int64_t>(1, least), kNoLimit}} {}

// The most that fit when the shortest come first.
std::int64_t DocumentBound::whole_in(std::int64_t tokens) const {
  std::int64_t whole = 0;
  for (const auto& [length, count] : documents_) {
    const std::int64_t fit = std::min(count, tokens / length);
    whole += fit;
    tokens -= fit * length;
    if (fit < count) break;
  }
  return whole;
}

std::int64_t DocumentBound::in(std::int64_t samples, std::int64_t sequence_length) const {
  const std::int64_t tokens = samples * sequence_length;
  // The windows of one epoch share no document but cut ones; a batch may lie across the border of epochs.
  std::int64_t epochs = 1;
  for (const std::int64_t sum : tokens_) {
    const std::int64_t windows = std::max<std::int64_t>(1, (sum - 1) / sequence_length);
    epochs = std::max(epochs, std::min(samples, samples / windows + 2));
  }
  // Every window cuts at most one document at each end.
  return std::min(tokens, epochs * whole_in(tokens) + 2 * samples);
}

}  // namespace moesaic::data
