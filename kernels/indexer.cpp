#include "kernels/ops/indexer.h"

#include <algorithm>

#include "kernels/causal_pairs.h"

namespace moesaic {
namespace {

DType stats_type(DType compute) {
  return compute == DType::f64 ? DType::f64 : DType::f32;
}

template <class Op>
void check_indexer(const Op& op) {
  MOESAIC_CHECK(op.qi.rank() == 3 && op.ki.rank() == 2, "qi must be [Tq, HI, dI] and ki [Tk, dI]");
  MOESAIC_CHECK(op.qi.dim(2) == op.ki.dim(1), "qi and ki must have the same width");
  MOESAIC_CHECK(op.qi.dim(0) <= op.ki.dim(0), "there are more queries than keys");
  check_dtype(op.ki, op.qi.dtype(), "ki");
  check_shape(op.w, {op.qi.dim(0), op.qi.dim(1)}, "w");
  MOESAIC_CHECK(op.w.dtype() == op.qi.dtype() || op.w.dtype() == stats_type(op.qi.dtype()),
                "w must have the compute or the statistics type");
  MOESAIC_CHECK(op.cu_seqlens.rank() == 1 && op.cu_seqlens.dim(0) >= 1, "cu_seqlens must be [N+1]");
  check_dtype(op.cu_seqlens, DType::i32, "cu_seqlens");
}

template <class Op>
void check_queries(const Op& op) {
  MOESAIC_CHECK(0 <= op.query_begin && op.last_query() <= op.qi.dim(0) &&
                    (op.query_begin < op.last_query() || op.qi.dim(0) == 0),
                "no such queries");
}
template <class Op>
double share_of_queries(const Op& op) {
  return static_cast<double>(op.last_query() - op.query_begin) /
         std::max(1.0, static_cast<double>(op.qi.dim(0)));
}

void check_indices(const ConstTensorView& selected, std::int64_t queries, const char* what) {
  MOESAIC_CHECK(selected.rank() == 2 && selected.dim(1) >= 1,
                "a selection must be [Tq, k], k >= 1");
  check_shape(selected, {queries, selected.dim(1)}, what);
  check_dtype(selected, DType::i32, what);
}
}  // namespace

void IndexerSelect::check() const {
  check_indexer(*this);
  check_indices(selected, qi.dim(0), "selected");
  check_queries(*this);
  MOESAIC_CHECK((given.empty() && scores.empty()) || last_query() - query_begin == qi.dim(0),
                "scores and a given choice are of all queries");
  if (!given.empty()) {
    check_shape(given, selected.shape(), "given");
    check_dtype(given, DType::i32, "given");
  }
  if (!scores.empty()) {
    check_shape(scores, {qi.dim(0), ki.dim(0)}, "scores");
    check_dtype(scores, stats_type(qi.dtype()), "scores");
  }
}

OpCost IndexerSelect::cost() const {
  const double heads = static_cast<double>(qi.dim(1)), dim = static_cast<double>(qi.dim(2));
  return {share_of_queries(*this) * causal_pairs(qi.dim(0), ki.dim(0), cu_seqlens.dim(0) - 1) *
              heads * (2 * dim + 2),
          static_cast<double>(qi.bytes() + ki.bytes() + w.bytes() + selected.bytes())};
}

void IndexerLoss::check() const {
  check_indexer(*this);
  const std::int64_t tokens_here = qi.dim(0), keys = ki.dim(0);
  MOESAIC_CHECK(q.rank() == 3 && q.dim(0) == tokens_here, "q must be [Tq, H, dn+dr]");
  MOESAIC_CHECK(kvb.rank() == 3 && kvb.dim(0) == keys && kvb.dim(1) == q.dim(1),
                "kvb must be [Tk, H, dn+dv]");
  MOESAIC_CHECK(0 <= dn && dn <= kvb.dim(2) && dn <= q.dim(2),
                "dn must not exceed the widths of q and kvb");
  check_dtype(q, qi.dtype(), "q");
  check_dtype(kvb, qi.dtype(), "kvb");
  if (q.dim(2) > dn) {
    check_shape(kr, {keys, q.dim(2) - dn}, "kr");
    check_dtype(kr, qi.dtype(), "kr");
  }
  check_shape(lse, {q.dim(1), tokens_here}, "lse");
  check_dtype(lse, stats_type(qi.dtype()), "lse");
  MOESAIC_CHECK(kl.numel() == 1, "kl must hold one element");
  check_dtype(kl, stats_type(qi.dtype()), "kl");
  if (!selected.empty()) check_indices(selected, tokens_here, "selected");
  check_queries(*this);
  MOESAIC_CHECK(path != AttentionPath::rows || !selected.empty(),
                "the path of single rows needs a selection");
  if (!tokens.empty()) {
    MOESAIC_CHECK(
        tokens.numel() == 1 && (tokens.dtype() == DType::f32 || tokens.dtype() == DType::f64),
        "tokens must be one f32 or f64");
  }
  MOESAIC_CHECK(dqi.empty() == dki.empty() && dqi.empty() == dw.empty(),
                "give all three gradients or none");
  if (dqi.empty()) return;
  check_shape(dqi, qi.shape(), "dqi");
  check_dtype(dqi, qi.dtype(), "dqi");
  check_shape(dki, ki.shape(), "dki");
  check_dtype(dki, ki.dtype(), "dki");
  check_shape(dw, w.shape(), "dw");
  check_dtype(dw, w.dtype(), "dw");
}

OpCost IndexerLoss::cost() const {
  const double n = share_of_queries(*this) * causal_pairs(qi.dim(0),
                                                          ki.dim(0),
                                                          cu_seqlens.dim(0) - 1,
                                                          selected.empty() ? 0 : selected.dim(1));
  const double index = static_cast<double>(qi.dim(1)) * (2 * static_cast<double>(qi.dim(2)) + 2);
  const double target = static_cast<double>(q.dim(1)) * 2 * static_cast<double>(q.dim(2));
  return {n * (target + index * (dqi.empty() ? 1 : 3)),
          static_cast<double>(qi.bytes() + ki.bytes() + w.bytes() + q.bytes() + kvb.bytes() +
                              kr.bytes() + lse.bytes() + selected.bytes() + dqi.bytes() +
                              dki.bytes() + dw.bytes())};
}

}  // namespace moesaic
