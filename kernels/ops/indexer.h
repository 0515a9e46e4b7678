#pragma once
#include "kernels/ops/attention.h"

namespace moesaic {

/// Index scores and selection of the keys for sparse attention:
///
///   I(t,s) = sum_j w(t,j) HI^(-1/2) dI^(-1/2) relu(<qi_j(t), ki(s)>),   s <= t, same document
///   selected[t] = the k visible keys of largest I, ties to the lower index; ascending, padded with
///   -1; all visible keys
///                 when there are at most k. NaN counts as -inf.
///
///   qi         [Tq, HI, dI]  compute type
///   ki         [Tk, dI]      compute type; one key for all indexer heads
///   w          [Tq, HI]      compute or statistics type; may be negative
///   cu_seqlens [N+1] i32     as in AttentionForward; Tq < Tk means the last Tq rows (decoding)
///   selected   [Tq, k] i32   global key indices
///   scores     [Tq, Tk]      statistics type, optional (tests, verify): I on visible pairs, 0
///   elsewhere given      [Tq, k] i32   optional: copied to `selected` instead of choosing (replay
///   of a saved choice)
///
/// Only the queries [query_begin, query_end) must be chosen for (query_end < 0: all up to Tq); other rows of `selected` need
/// not be written. A row's bits do not depend on which others are wanted. Not together with scores or given.
///
/// Scores are summed in the statistics type; selection is exact. No gradient passes through the
/// selection. Source: SPEC sections 3.1 and 3.2.
struct IndexerSelect {
  static constexpr const char* kName = "indexer_select";
  TensorView selected;
  TensorView scores;
  ConstTensorView qi;
  ConstTensorView ki;
  ConstTensorView w;
  ConstTensorView cu_seqlens;
  ConstTensorView given;
  std::int64_t query_begin = 0;
  std::int64_t query_end = -1;

  void check() const;
  OpCost cost() const;
  std::int64_t last_query() const { return query_end < 0 ? qi.dim(0) : query_end; }
};

/// Loss of the indexer and its gradient. Per query t, over its keys (all visible ones, or
/// selected[t]):
///
///   target p(s) = sum_h exp(logit_h(t,s) - lse_h(t)), divided by its sum;   kl += sum_t KL(p ||
///   softmax_s I(t,s)) dI = (softmax(I) - p) * weight / tokens, then  dw = ct sum_s dI relu(a),  da
///   = ct w dI 1[a > 0], dqi = sum_s da ki,  dki = sum_(t,j) da qi,   a = <qi_j(t), ki(s)>,  ct =
///   HI^(-1/2) dI^(-1/2)
///
///   kl            scalar (one element), statistics type; accumulates the plain sum over queries
///   (not weighted) dqi, dki, dw  shapes and types of qi, ki, w; overwritten; all three empty =
///   loss only q, kvb, kr, lse, scale, cu_seqlens, selected  as in AttentionForward (Tq < Tk: the
///   loss of these queries); dn and dr are given here, because
///                 no output shows dv. The lse is that of the attention over the same keys. All of
///                 them are constants: no gradient reaches them
///   selected      empty = warm-up stage (all visible keys)
///   tokens        one element, f32 | f64: divisor; empty = 1
///
/// Only the queries [query_begin, query_end) count (query_end < 0: all up to T): the others have KL 0, rows of 0 in dqi and dw,
/// and add nothing to dki, so that ranks can share the queries and add up what they find.
///
/// A query with one key gives KL 0 and gradient 0. Memory: one query block against its document,
/// never all heads. The path is chosen as in attention, except that few queries are no reason for
/// single rows, which need a selection. Source: SPEC section 3.4.
struct IndexerLoss {
  static constexpr const char* kName = "indexer_loss";
  TensorView kl;
  TensorView dqi;
  TensorView dki;
  TensorView dw;
  ConstTensorView qi;
  ConstTensorView ki;
  ConstTensorView w;
  ConstTensorView q;
  ConstTensorView kvb;
  ConstTensorView kr;
  ConstTensorView lse;
  ConstTensorView cu_seqlens;
  ConstTensorView selected;
  ConstTensorView tokens;
  std::int64_t dn = 0;  ///< width of the key part in kvb; q.dim(2) - dn is the width of kr
  double scale = 1.0;
  double weight = 1.0;
  AttentionPath path = AttentionPath::automatic;
  std::int64_t query_begin = 0;
  std::int64_t query_end = -1;

  void check() const;
  OpCost cost() const;
  std::int64_t last_query() const { return query_end < 0 ? qi.dim(0) : query_end; }
  bool counts(std::int64_t t) const { return query_begin <= t && t < last_query(); }
};

void launch(CpuContext& context, const IndexerSelect& op);
void launch(CpuContext& context, const IndexerLoss& op);
void launch(CudaContext& context, const IndexerSelect& op);
void launch(CudaContext& context, const IndexerLoss& op);

}  // namespace moesaic
