#include "kernels/ops/kda_segment.h"

#include "kernels/checks.h"

namespace moesaic {
namespace {

void check_documents(const ConstTensorView& cu_seqlens) {
  MOESAIC_CHECK(cu_seqlens.rank() == 1 && cu_seqlens.dim(0) >= 2,
                "cu_seqlens must be [documents + 1], one document or more");
  check_dtype(cu_seqlens, DType::i32, "cu_seqlens");
}

void check_keys(const ConstTensorView& k, const ConstTensorView& g, const ConstTensorView& beta) {
  MOESAIC_CHECK(k.rank() == 3 && k.dim(1) >= 1 && k.dim(2) >= 1, "k must be [T, heads, K]");
  check_acc(g, k.shape(), k.dtype(), "g");
  check_acc(beta, {k.dim(0), k.dim(1)}, k.dtype(), "beta");
}

// Of one pass of the recurrence over `columns` columns of the states of all heads.
double recurrence_flops(const ConstTensorView& k, std::int64_t columns) {
  return 5.0 * static_cast<double>(k.numel() * columns);
}

}  // namespace

void KdaSegmentMap::check() const {
  check_keys(k, g, beta);
  check_documents(cu_seqlens);
  const std::int64_t heads = k.dim(1), K = k.dim(2);
  MOESAIC_CHECK(v.rank() == 3 && v.dim(2) >= 1, "v must be [T, heads, V]");
  check_shape(v, {k.dim(0), heads, v.dim(2)}, "v");
  check_dtype(v, k.dtype(), "v");
  check_acc(m, {heads, K, K}, k.dtype(), "m");
  check_acc(e, {heads, K, v.dim(2)}, k.dtype(), "e");
}

OpCost KdaSegmentMap::cost() const {
  return {recurrence_flops(k, k.dim(2) + v.dim(2)), total_bytes({m, e, k, v, g, beta})};
}

void KdaSegmentGradient::check() const {
  check_keys(k, g, beta);
  check_documents(cu_seqlens);
  check_like(q, k, "q");
  MOESAIC_CHECK(d_o.rank() == 3 && d_o.dim(2) >= 1, "d_o must be [T, heads, V]");
  check_shape(d_o, {k.dim(0), k.dim(1), d_o.dim(2)}, "d_o");
  check_dtype(d_o, k.dtype(), "d_o");
  check_acc(f, {k.dim(1), k.dim(2), d_o.dim(2)}, k.dtype(), "f");
}

OpCost KdaSegmentGradient::cost() const {
  return {recurrence_flops(k, d_o.dim(2)) * 1.4, total_bytes({f, d_o, q, k, g, beta})};
}

void KdaSegmentChain::check() const {
  MOESAIC_CHECK(e.rank() == 4 && e.dim(0) >= 1, "e must be [pieces, heads, K, V]");
  const std::int64_t pieces = e.dim(0), heads = e.dim(1), K = e.dim(2), V = e.dim(3);
  MOESAIC_CHECK(state.dtype() == DType::f32 || state.dtype() == DType::f64, "state is f32 or f64");
  check_shape(state, {heads, K, V}, "state");
  check_dtype(e, state.dtype(), "e");
  check_shape(m, {pieces, heads, K, K}, "m");
  check_dtype(m, state.dtype(), "m");
  MOESAIC_CHECK(state.data() != e.data(), "state must not alias e");
}

OpCost KdaSegmentChain::cost() const {
  return {2.0 * static_cast<double>((e.dim(0) - 1) * state.numel() * state.dim(1)),
          total_bytes({state, m, e})};
}

}  // namespace moesaic
