#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/data/token_source.h"

namespace moesaic::data {

/// How many documents a batch can hold at most, whatever its samples are: memory that kernels need per document is planned
/// with it.
class DocumentBound {
 public:
  /// For batches from this source; looks at all lengths once.
  explicit DocumentBound(const TokenSource& source);
  /// For a source that is not at hand, without documents below `least` tokens.
  explicit DocumentBound(std::int64_t least);

  /// Documents, whole and cut ones, in `samples` windows of `sequence_length` tokens of PackedDataset or ValidationSet.
  std::int64_t in(std::int64_t samples, std::int64_t sequence_length) const;

 private:
  std::int64_t whole_in(std::int64_t tokens) const;
  std::vector<std::int64_t> shortest_;  // shortest_[i] = tokens of the i + 1 shortest documents
  std::int64_t next_length_ = 1;        // no document that is left out of shortest_ is shorter
  std::int64_t tokens_ = 0;             // of the source; 0 = not known
};

}  // namespace moesaic::data
