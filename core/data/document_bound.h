#pragma once
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/data/token_source.h"

namespace moesaic::data {

/// How many documents a batch can hold at most, whatever its samples are: memory that kernels need per document is planned
/// with it.
class DocumentBound {
 public:
  /// For batches from this source; looks at all lengths once.
  explicit DocumentBound(const TokenSource& source);
  /// For batches whose samples may come from any of these sources.
  explicit DocumentBound(std::span<const TokenSource* const> sources);
  /// For a source that is not at hand, without documents below `least` tokens.
  explicit DocumentBound(std::int64_t least);

  /// Documents, whole and cut ones, in `samples` windows of `sequence_length` tokens of PackedDataset or ValidationSet.
  std::int64_t in(std::int64_t samples, std::int64_t sequence_length) const;

 private:
  std::int64_t whole_in(std::int64_t tokens) const;
  // Documents by length, shortest first. Long ones share an entry, with the least length of theirs: few of them fit
  // anywhere. Without limit: a number of documents that no batch reaches.
  std::vector<std::pair<std::int64_t, std::int64_t>> documents_;
  std::vector<std::int64_t> tokens_;  // of each source; empty = not known
};

}  // namespace moesaic::data
