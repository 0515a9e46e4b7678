#include "kernels/ops/attention.h"

#include <algorithm>

#include "kernels/causal_pairs.h"

namespace moesaic {
namespace {

DType stats_type(DType compute) {
  return compute == DType::f64 ? DType::f64 : DType::f32;
}

template <class Op>
void check_inputs(const Op& op, std::int64_t dv) {
  MOESAIC_CHECK(op.q.rank() == 3 && op.kvb.rank() == 3,
                "q must be [Tq, H, dn+dr] and kvb [Tk, H, dn+dv]");
  MOESAIC_CHECK(op.q.dim(1) == op.kvb.dim(1), "q and kvb must have the same heads");
  MOESAIC_CHECK(op.q.dim(0) <= op.kvb.dim(0), "there are more queries than keys");
  const std::int64_t dn = op.kvb.dim(2) - dv;
  const std::int64_t dr = op.q.dim(2) - dn;
  MOESAIC_CHECK(dn >= 0 && dr >= 0 && dn + dr > 0 && dv > 0, "widths of q, kvb and o do not fit");
  check_dtype(op.kvb, op.q.dtype(), "kvb");
  if (dr > 0) {
    check_shape(op.kr, {op.kvb.dim(0), dr}, "kr");
    check_dtype(op.kr, op.q.dtype(), "kr");
  }
  MOESAIC_CHECK(op.cu_seqlens.rank() == 1 && op.cu_seqlens.dim(0) >= 1, "cu_seqlens must be [N+1]");
  check_dtype(op.cu_seqlens, DType::i32, "cu_seqlens");
  if (!op.selected.empty()) {
    check_shape(op.selected, {op.q.dim(0), op.selected.dim(1)}, "selected");
    check_dtype(op.selected, DType::i32, "selected");
  }
}

// Multiply-adds of one pass over the visible pairs, per unit of width: 2 per pair and head.
template <class Op>
double pair_flops(const Op& op) {
  const std::int64_t cap = op.selected.empty() ? 0 : op.selected.dim(1);
  return 2 * causal_pairs(op.q.dim(0), op.kvb.dim(0), op.cu_seqlens.dim(0) - 1, cap) *
         static_cast<double>(op.q.dim(1));
}

}  // namespace

void AttentionForward::check() const {
  MOESAIC_CHECK(o.rank() == 3, "o must be [Tq, H, dv]");
  check_inputs(*this, o.dim(2));
  check_shape(o, {q.dim(0), q.dim(1), o.dim(2)}, "o");
  check_dtype(o, stats_type(q.dtype()), "o");
  check_shape(lse, {q.dim(1), q.dim(0)}, "lse");
  check_dtype(lse, stats_type(q.dtype()), "lse");
  if (!max_logit.empty()) {
    check_shape(max_logit, {q.dim(1)}, "max_logit");
    check_dtype(max_logit, stats_type(q.dtype()), "max_logit");
  }
}

OpCost AttentionForward::cost() const {
  return {pair_flops(*this) * static_cast<double>(q.dim(2) + o.dim(2)),
          static_cast<double>(q.bytes() + kvb.bytes() + kr.bytes() + o.bytes() + lse.bytes() +
                              selected.bytes())};
}

void AttentionBackward::check() const {
  MOESAIC_CHECK(o.rank() == 3, "o must be [Tq, H, dv]");
  check_inputs(*this, o.dim(2));
  check_shape(o, {q.dim(0), q.dim(1), o.dim(2)}, "o");
  check_dtype(o, stats_type(q.dtype()), "o");
  check_shape(d_o, o.shape(), "d_o");
  MOESAIC_CHECK(d_o.dtype() == q.dtype() || d_o.dtype() == stats_type(q.dtype()),
                "d_o must have the compute or the statistics type");
  check_shape(lse, {q.dim(1), q.dim(0)}, "lse");
  check_dtype(lse, stats_type(q.dtype()), "lse");
  check_shape(dq, q.shape(), "dq");
  check_dtype(dq, q.dtype(), "dq");
  check_shape(dkvb, kvb.shape(), "dkvb");
  check_dtype(dkvb, q.dtype(), "dkvb");
  if (q.dim(2) + o.dim(2) > kvb.dim(2)) {
    check_shape(dkr, kr.shape(), "dkr");
    check_dtype(dkr, q.dtype(), "dkr");
  }
}

OpCost AttentionBackward::cost() const {
  // Logits again, dq and dk; dp and dv.
  return {pair_flops(*this) * static_cast<double>(3 * q.dim(2) + 2 * o.dim(2)),
          static_cast<double>(2 * (q.bytes() + kvb.bytes() + kr.bytes()) + d_o.bytes() + o.bytes() +
                              lse.bytes() + selected.bytes())};
}

}  // namespace moesaic
