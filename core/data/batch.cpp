#include "core/data/batch.h"

#include "core/base/error.h"
#include "core/data/token_source.h"

namespace moesaic::data {

Batch make_batch(std::int64_t sequence_length, std::int64_t count) {
  MOESAIC_CHECK(count >= 0 && count <= INT32_MAX / sequence_length,
                "a batch of more than 2^31 tokens");
  Batch b;
  b.sequence_length = sequence_length;
  b.cu.push_back(0);
  for (auto* v : {&b.tokens, &b.labels, &b.positions})
    v->reserve(static_cast<std::size_t>(count * sequence_length));
  return b;
}

void append_filler(Batch& b, std::int64_t tokens) {
  if (tokens == 0) return;
  const auto length = static_cast<std::size_t>(tokens);
  b.tokens.insert(b.tokens.end(), length, 0);
  b.labels.insert(b.labels.end(), length, kIgnoredLabel);
  for (std::size_t t = 0; t < length; ++t)
    b.positions.push_back(static_cast<std::int32_t>(t));
  b.cu.push_back(static_cast<std::int32_t>(b.tokens.size()));
}

}  // namespace moesaic::data
