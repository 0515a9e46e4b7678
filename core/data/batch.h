#pragma once
#include <cstdint>
#include <vector>

namespace moesaic::data {

/// Some windows of `sequence_length` tokens as one packed sequence of T = num_samples *
/// sequence_length.
///
/// labels[t] is the token after tokens[t], or kIgnoredLabel where that would be the first token of
/// another document or is no target of the loss. `cu` = document boundaries, 0 = cu[0] < … < cu[N]
/// = T: a document starts at every sample's first token and after the last token of the one before.
struct Batch {
  std::int64_t num_samples = 0;
  std::int64_t sequence_length = 0;
  std::vector<std::int32_t> tokens;     ///< [T]
  std::vector<std::int32_t> labels;     ///< [T]
  std::vector<std::int32_t> positions;  ///< [T], from 0 at every document boundary
  std::vector<std::int32_t> cu;         ///< [N + 1]
  std::int64_t valid_labels = 0;        ///< how many labels are not kIgnoredLabel
};

/// A batch without samples, with room for `count` of them.
Batch make_batch(std::int64_t sequence_length, std::int64_t count);

/// Adds `tokens` tokens (a document of one token value) without labels.
void append_filler(Batch& batch, std::int64_t tokens);

}  // namespace moesaic::data
