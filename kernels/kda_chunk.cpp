#include "kernels/ops/kda_chunk.h"

#include "kernels/cpu/kda_workspace.h"

namespace moesaic {
namespace {

DType wide(DType t) {
  return t == DType::f64 ? DType::f64 : DType::f32;
}

void check_as(const ConstTensorView& view, const Shape& shape, DType dtype, const char* what) {
  check_shape(view, shape, what);
  check_dtype(view, dtype, what);
}

/// Tensors that forward, backward and step share; `rows` is tokens or sequences.
template <class Op>
void check_operands(const Op& op) {
  MOESAIC_CHECK(op.q.rank() == 3 && op.v.rank() == 3, "q and v must be [tokens, heads, head size]");
  const auto rows = op.q.dim(0), heads = op.q.dim(1);
  MOESAIC_CHECK(op.q.dim(2) >= 1 && op.v.dim(2) >= 1 && heads >= 1,
                "KDA needs heads of at least one channel");
  check_as(op.k, op.q.shape(), op.q.dtype(), "k");
  check_as(op.v, {rows, heads, op.v.dim(2)}, op.q.dtype(), "v");
  check_as(op.g, op.q.shape(), wide(op.q.dtype()), "g");
  check_as(op.beta, {rows, heads}, wide(op.q.dtype()), "beta");
}

// One state per document, or that of the first or last one alone.
template <class Op>
void check_states(const Op& op, const ConstTensorView& states, const char* what) {
  if (states.empty()) return;
  const std::int64_t documents = op.cu_seqlens.dim(0) - 1,
                     given =
                         states.rank() == 4 && states.dim(0) == 1 && documents > 0 ? 1 : documents;
  check_as(states, {given, op.q.dim(1), op.q.dim(2), op.v.dim(2)}, op.g.dtype(), what);
}

template <class Op>
void check_chunks(const Op& op) {
  check_operands(op);
  MOESAIC_CHECK(op.chunk_size >= 16 && op.chunk_size <= 64 && op.chunk_size % 16 == 0,
                "chunk_size is 16, 32, 48 or 64");
  MOESAIC_CHECK(op.cu_seqlens.rank() == 1 && op.cu_seqlens.dim(0) >= 1,
                "cu_seqlens must be [documents + 1]");
  check_dtype(op.cu_seqlens, DType::i32, "cu_seqlens");
  check_states(op, op.s0, "s0");
  if (op.saved.empty()) return;
  check_dtype(op.saved, op.g.dtype(), "saved");
  MOESAIC_CHECK(op.saved.numel() == kda_saved_numel(op.q.dim(0),
                                                    op.cu_seqlens.dim(0) - 1,
                                                    op.q.dim(1),
                                                    op.q.dim(2),
                                                    op.v.dim(2),
                                                    op.chunk_size),
                "saved has another size than kda_saved_numel says");
}

/// Multiply-adds of one chunk-parallel forward, SPEC 1.9.
template <class Op>
double forward_flops(const Op& op) {
  const auto K = static_cast<double>(op.q.dim(2)), V = static_cast<double>(op.v.dim(2)),
             C = op.chunk_size;
  return static_cast<double>(op.q.dim(0) * op.q.dim(1)) * (2 * C * K + 2 * C * V + 6 * K * V);
}

}  // namespace

std::int64_t kda_saved_numel(std::int64_t tokens,
                             std::int64_t documents,
                             std::int64_t heads,
                             std::int64_t key_dim,
                             std::int64_t value_dim,
                             int chunk_size) {
  return (tokens / chunk_size + documents) * heads *
         cpu::KdaSizes(key_dim, value_dim, chunk_size).record_numel();
}

void KdaChunkForward::check() const {
  check_chunks(*this);
  check_as(o, v.shape(), q.dtype(), "o");
  check_states(*this, s_final, "s_final");
}

OpCost KdaChunkForward::cost() const {
  return {forward_flops(*this),
          static_cast<double>(q.bytes() + k.bytes() + v.bytes() + o.bytes() + g.bytes() +
                              beta.bytes() + saved.bytes())};
}

void KdaChunkBackward::check() const {
  check_chunks(*this);
  check_as(d_o, v.shape(), q.dtype(), "d_o");
  check_as(dq, q.shape(), q.dtype(), "dq");
  check_as(dk, q.shape(), q.dtype(), "dk");
  check_as(dv, v.shape(), q.dtype(), "dv");
  check_as(dg, g.shape(), g.dtype(), "dg");
  check_as(dbeta, beta.shape(), g.dtype(), "dbeta");
  check_states(*this, ds0, "ds0");
  check_states(*this, ds_final, "ds_final");
}

OpCost KdaChunkBackward::cost() const {
  const double recompute = saved.empty() ? 1.0 : 0.0;
  return {forward_flops(*this) * (2.5 + recompute),
          2.0 * static_cast<double>(q.bytes() + k.bytes() + v.bytes() + g.bytes() + beta.bytes()) +
              static_cast<double>(saved.bytes())};
}

void KdaStep::check() const {
  check_operands(*this);
  const Shape state{q.dim(0), q.dim(1), q.dim(2), v.dim(2)};
  check_as(o, v.shape(), q.dtype(), "o");
  check_as(s_in, state, g.dtype(), "s_in");
  check_as(s_out, state, g.dtype(), "s_out");
}

OpCost KdaStep::cost() const {
  return {6.0 * static_cast<double>(s_in.numel()), 2.0 * static_cast<double>(s_in.bytes())};
}

}  // namespace moesaic
