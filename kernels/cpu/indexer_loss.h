#pragma once
// The two ways to compute IndexerLoss on the CPU; the rule between them is that of AttentionPath.
#include <cstring>

#include "kernels/cpu/attention_common.h"
#include "kernels/cpu/indexer_common.h"
#include "kernels/ops/indexer.h"

namespace moesaic::cpu {

inline double divisor(const ConstTensorView& tokens) {
  if (tokens.empty()) return 1.0;
  return tokens.dtype() == DType::f64 ? *tokens.as<double>()
                                      : static_cast<double>(*tokens.as<float>());
}
/// kl += the rows' values, added in f64 in order.
template <class A>
void add_rows_to_scalar(TensorView kl, const A* rows, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i)
    sum += static_cast<double>(rows[i]);
  *kl.as<A>() = static_cast<A>(static_cast<double>(*kl.as<A>()) + sum);
}

/// Rows [begin, end) of the queries' gradients become 0, where there are any.
inline void clear_query_gradients(const IndexerLoss& op, std::int64_t begin, std::int64_t end) {
  if (op.dqi.empty()) return;
  for (const TensorView& all : {op.dqi, op.dw}) {
    const TensorView rows = all.rows(begin, end);
    std::memset(rows.data(), 0, rows.bytes());
  }
}

inline PathRule path_rule(const IndexerLoss& op) {
  return {op.selected.empty() ? AttentionPath::dense : op.path, selection_size(op.selected), 0};
}

/// The documents walked by tiles: one block of queries after another against all keys of its
/// document, tiles masked by the selection if there is one.
template <class A>
void indexer_loss_dense(CpuContext& context, const IndexerLoss& op);
/// The documents walked by rows: one query after another over its selected keys; then the keys'
/// gradients, each key by one owner, queries in order.
template <class A>
void indexer_loss_rows(CpuContext& context, const IndexerLoss& op);

}  // namespace moesaic::cpu
