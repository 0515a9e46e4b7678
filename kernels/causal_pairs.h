#pragma once
#include <algorithm>
#include <cstdint>

namespace moesaic {

/// (query, key) pairs that causal attention looks at, for cost(): documents count as equally long, since their lengths are
/// data; queries fewer than keys are the last rows. `cap` > 0: at most so many keys per query.
inline double causal_pairs(std::int64_t queries,
                           std::int64_t keys,
                           std::int64_t documents,
                           std::int64_t cap = 0) {
  const double n = queries == keys ? static_cast<double>(std::max<std::int64_t>(1, documents)) : 1;
  const double last = static_cast<double>(keys) / n,  // visible to a document's last query
      rows = static_cast<double>(queries) / n, first = last - rows + 1;
  const double most = cap > 0 ? static_cast<double>(cap) : last;
  if (most >= last) return n * rows * (first + last) / 2;
  const double growing = std::max(0.0, most - first);  // queries that see fewer than `most`
  return n * (growing * (first + most - 1) / 2 + (rows - growing) * most);
}

}  // namespace moesaic
