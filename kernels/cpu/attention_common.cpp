#include "kernels/cpu/attention_common.h"

namespace moesaic::cpu {

AttentionSizes attention_sizes(const ConstTensorView& q,
                               const ConstTensorView& kvb,
                               std::int64_t dn) {
  return {.queries = q.dim(0),
          .keys = kvb.dim(0),
          .heads = q.dim(1),
          .dn = dn,
          .dr = q.dim(2) - dn,
          .dv = kvb.dim(2) - dn};
}

TensorView SelectionBits::take(Arena& scratch,
                               const PathRule& rule,
                               std::int64_t queries,
                               std::int64_t keys) {
  const std::int64_t longest = rule.longest_dense(keys);
  if (rule.k == 0 || longest == 0) return {};
  return scratch.take({queries, tiles_of(longest)}, DType::i64, "selection bits");
}

SelectionBits::SelectionBits(ThreadPool& pool,
                             TensorView memory,
                             const Visibility& see,
                             const PathRule& rule) {
  if (memory.empty()) return;
  words = reinterpret_cast<std::uint64_t*>(memory.data());
  per_row = memory.dim(1);
  pool.parallel_for(memory.dim(0), kTile, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t doc = see.document_of(see.first + row);
      const bool by_rows =
          rule.rows(see.query_end(doc) - see.query_begin(doc), see.cu[doc + 1] - see.cu[doc]);
      if (!by_rows) see.selection_words(row, words + row * per_row);
    }
  });
}

}  // namespace moesaic::cpu
