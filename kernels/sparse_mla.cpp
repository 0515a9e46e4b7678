#include "kernels/ops/sparse_mla.h"

#include "kernels/causal_pairs.h"
#include "kernels/checks.h"

namespace moesaic {
namespace {

template <class Op>
void check_inputs(const Op& op) {
  MOESAIC_CHECK(op.q.rank() == 3 && op.kv.rank() == 2 && op.o.rank() == 3,
                "q must be [Tq, H, dc+dr], kv [Tk, dc+dr], o [Tq, H, dc]");
  const std::int64_t rows = op.q.dim(0), heads = op.q.dim(1), width = op.q.dim(2);
  MOESAIC_CHECK(rows <= op.kv.dim(0), "there are more queries than keys");
  MOESAIC_CHECK(op.kv.dim(1) == width && op.o.dim(2) > 0 && op.o.dim(2) <= width,
                "widths of q, kv and o do not fit");
  check_dtype(op.kv, op.q.dtype(), "kv");
  check_shape(op.o, {rows, heads, op.o.dim(2)}, "o");
  check_dtype(op.o, op.q.dtype(), "o");
  check_acc(op.lse, {heads, rows}, op.q.dtype(), "lse");
  MOESAIC_CHECK(op.cu_seqlens.rank() == 1 && op.cu_seqlens.dim(0) >= 1, "cu_seqlens must be [N+1]");
  check_dtype(op.cu_seqlens, DType::i32, "cu_seqlens");
  MOESAIC_CHECK(op.selected.rank() == 2 && op.selected.dim(1) > 0, "selected must be [Tq, k]");
  check_shape(op.selected, {rows, op.selected.dim(1)}, "selected");
  check_dtype(op.selected, DType::i32, "selected");
}

// Multiply-adds of one pass over the selected pairs, per unit of width: 2 per pair and head.
template <class Op>
double pair_flops(const Op& op) {
  return 2 * causal_pairs(op.q.dim(0), op.kv.dim(0), op.cu_seqlens.dim(0) - 1, op.selected.dim(1)) *
         static_cast<double>(op.q.dim(1));
}

}  // namespace

void SparseMlaForward::check() const {
  check_inputs(*this);
  if (!max_logit.empty()) check_acc(max_logit, {q.dim(1)}, q.dtype(), "max_logit");
}

OpCost SparseMlaForward::cost() const {
  return {pair_flops(*this) * static_cast<double>(q.dim(2) + o.dim(2)),
          total_bytes({q, kv, o, lse, selected})};
}

void SparseMlaBackward::check() const {
  check_inputs(*this);
  check_like(d_o, o, "d_o");
  check_like(dq, q, "dq");
  check_like(dkv, kv, "dkv");
}

OpCost SparseMlaBackward::cost() const {
  // Logits again, dq and the keys' part of dkv; dp and the values' part.
  return {pair_flops(*this) * static_cast<double>(3 * q.dim(2) + 2 * o.dim(2)),
          total_bytes({q, q, kv, kv, d_o, o, lse, selected})};
}

}  // namespace moesaic
