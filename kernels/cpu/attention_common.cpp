#include "kernels/cpu/attention_common.h"

namespace moesaic::cpu {

AttentionSizes attention_sizes(const ConstTensorView& q, const ConstTensorView& kvb, std::int64_t dn) {
  return {.queries = q.dim(0), .keys = kvb.dim(0), .heads = q.dim(1), .dn = dn, .dr = q.dim(2) - dn, .dv = kvb.dim(2) - dn};
}

bool takes_rows(AttentionPath path, std::int64_t queries, std::int64_t keys, const ConstTensorView& selected) {
  constexpr std::int64_t kFewQueries = 8, kKeysPerSelected = 16;
  if (path != AttentionPath::automatic) return path == AttentionPath::rows;
  return queries <= kFewQueries || (!selected.empty() && selected.dim(1) * kKeysPerSelected < keys);
}

void fill_selection_words(ThreadPool& pool, const Visibility& see, std::int64_t queries, std::uint64_t* words) {
  pool.parallel_for(queries, kTile, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) see.selection_words(row, words + row * words_per_row(see.keys));
  });
}

}  // namespace moesaic::cpu
