#include "kernels/ops/kda_segment.h"

#include "kernels/cpu/documents.h"
#include "kernels/cpu/flush_denormals.h"
#include "kernels/cpu/kda_core.h"
#include "kernels/cpu/scratch_slots.h"
#include "kernels/cpu/thread_pool.h"

namespace moesaic {
namespace {

using cpu::Documents;
using cpu::ScratchSlots;

constexpr std::int64_t kColumns = 64;  // of the state at a time; they do not depend on each other

std::int64_t column_blocks(std::int64_t columns) {
  return (columns + kColumns - 1) / kColumns;
}

template <class A>
A decay(A g) {
  return g < cpu::kKdaDecayFloor<A> ? A(0) : cpu::exp(g);
}

// read[j] = sum_c x[c] s[c, j], c in order.
template <class A, class T>
void read_columns(A* read, const A* s, const T* x, std::int64_t K) {
  std::fill_n(read, kColumns, A(0));
  for (std::int64_t c = 0; c < K; ++c) {
    const A factor = static_cast<A>(x[c]);
#pragma omp simd
    for (std::int64_t j = 0; j < kColumns; ++j)
      read[j] += factor * s[c * kColumns + j];
  }
}
// s[c, j] += x[c] y[j].
template <class A, class T>
void add_outer(A* s, const T* x, const A* y, std::int64_t K) {
  for (std::int64_t c = 0; c < K; ++c) {
    const A factor = static_cast<A>(x[c]);
#pragma omp simd
    for (std::int64_t j = 0; j < kColumns; ++j)
      s[c * kColumns + j] += factor * y[j];
  }
}
template <class A>
void decay_rows(A* s, const A* g, std::int64_t K) {
  for (std::int64_t c = 0; c < K; ++c) {
    const A alpha = decay(g[c]);
#pragma omp simd
    for (std::int64_t j = 0; j < kColumns; ++j)
      s[c * kColumns + j] *= alpha;
  }
}

template <class A>
void store_columns(A* out, std::int64_t ld, const A* s, std::int64_t K, std::int64_t count) {
  for (std::int64_t c = 0; c < K; ++c)
    std::copy_n(s + c * kColumns, count, out + c * ld);
}

// Columns [c0, c0 + count) of M or of E; v null: of M, whose recurrence starts from the identity and sees no values.
template <class T>
void map_columns(const KdaSegmentMap& op,
                 const Documents& documents,
                 std::int64_t h,
                 std::int64_t c0,
                 std::int64_t count,
                 bool of_e,
                 acc_t<T>* s) {
  using A = acc_t<T>;
  const std::int64_t heads = op.k.dim(1), K = op.k.dim(2), V = op.v.dim(2);
  std::fill_n(s, K * kColumns, A(0));
  for (std::int64_t j = 0; !of_e && j < count; ++j)
    s[(c0 + j) * kColumns + j] = A(1);
  const std::int64_t last = documents.count - 1;
  for (std::int64_t t = documents.begin(last); t < documents.end(last); ++t) {
    const std::int64_t row = t * heads + h;
    const T* k = op.k.as<T>() + row * K;
    A u[kColumns];
    decay_rows(s, op.g.as<A>() + row * K, K);
    read_columns(u, s, k, K);
    const A beta = op.beta.as<A>()[row];
    for (std::int64_t j = 0; j < kColumns; ++j) {
      const A value = of_e && j < count ? static_cast<A>(op.v.as<T>()[row * V + c0 + j]) : A(0);
      u[j] = beta * (value - u[j]);
    }
    add_outer(s, k, u, K);
  }
  if (of_e) {
    store_columns(op.e.as<A>() + h * K * V + c0, V, s, K, count);
  } else {
    store_columns(op.m.as<A>() + h * K * K + c0, K, s, K, count);
  }
}

template <class T>
void map(ThreadPool& pool, const KdaSegmentMap& op, TensorView scratch) {
  const Documents documents(op.cu_seqlens, op.k.dim(0));
  const std::int64_t K = op.k.dim(2), V = op.v.dim(2), of_m = column_blocks(K),
                     blocks = of_m + column_blocks(V);
  ScratchSlots slots(scratch);
  pool.parallel_for(op.k.dim(1) * blocks, 1, [&](std::int64_t task, std::int64_t) {
    const cpu::FlushDenormals flush;
    const ScratchSlots::Lease<acc_t<T>> s(slots);
    const std::int64_t block = task % blocks;
    const bool of_e = block >= of_m;
    const std::int64_t c0 = (of_e ? block - of_m : block) * kColumns;
    map_columns<T>(
        op, documents, task / blocks, c0, std::min(kColumns, (of_e ? V : K) - c0), of_e, s.data());
  });
}

// Columns [c0, c0 + count) of F: dS of the recurrence, last token first.
template <class T>
void gradient_columns(const KdaSegmentGradient& op,
                      const Documents& documents,
                      std::int64_t h,
                      std::int64_t c0,
                      std::int64_t count,
                      acc_t<T>* ds) {
  using A = acc_t<T>;
  const std::int64_t heads = op.k.dim(1), K = op.k.dim(2), V = op.d_o.dim(2);
  std::fill_n(ds, K * kColumns, A(0));
  for (std::int64_t t = documents.end(0) - 1; t >= documents.begin(0); --t) {
    const std::int64_t row = t * heads + h;
    const T* k = op.k.as<T>() + row * K;
    A d_o[kColumns] = {}, du[kColumns];
    for (std::int64_t j = 0; j < count; ++j)
      d_o[j] = static_cast<A>(op.d_o.as<T>()[row * V + c0 + j]);
    add_outer(ds, op.q.as<T>() + row * K, d_o, K);
    read_columns(du, ds, k, K);
    const A beta = op.beta.as<A>()[row];
    for (A& x : du)
      x *= -beta;
    add_outer(ds, k, du, K);
    decay_rows(ds, op.g.as<A>() + row * K, K);
  }
  store_columns(op.f.as<A>() + h * K * V + c0, V, ds, K, count);
}

template <class T>
void gradient(ThreadPool& pool, const KdaSegmentGradient& op, TensorView scratch) {
  const Documents documents(op.cu_seqlens, op.k.dim(0));
  const std::int64_t V = op.d_o.dim(2), blocks = column_blocks(V);
  ScratchSlots slots(scratch);
  pool.parallel_for(op.k.dim(1) * blocks, 1, [&](std::int64_t task, std::int64_t) {
    const cpu::FlushDenormals flush;
    const ScratchSlots::Lease<acc_t<T>> ds(slots);
    const std::int64_t c0 = task % blocks * kColumns;
    gradient_columns<T>(op, documents, task / blocks, c0, std::min(kColumns, V - c0), ds.data());
  });
}

// out = M in + E or M^T in + E, all of one head.
template <class A>
void advance(A* out, const A* m, const A* in, const A* e, std::int64_t K, std::int64_t V, bool t) {
  for (std::int64_t c = 0; c < K; ++c) {
    A* row = out + c * V;
    std::fill_n(row, V, A(0));
    for (std::int64_t i = 0; i < K; ++i) {
      const A factor = t ? m[i * K + c] : m[c * K + i];
#pragma omp simd
      for (std::int64_t j = 0; j < V; ++j)
        row[j] += factor * in[i * V + j];
    }
#pragma omp simd
    for (std::int64_t j = 0; j < V; ++j)
      row[j] += e[c * V + j];
  }
}

template <class A>
void chain(ThreadPool& pool, const KdaSegmentChain& op, TensorView scratch) {
  const std::int64_t pieces = op.e.dim(0), heads = op.e.dim(1), K = op.e.dim(2), V = op.e.dim(3);
  ScratchSlots slots(scratch);
  pool.parallel_for(heads, 1, [&](std::int64_t h, std::int64_t) {
    const ScratchSlots::Lease<A> before(slots);
    A* state = op.state.as<A>() + h * K * V;
    for (std::int64_t i = 0; i < pieces; ++i) {
      const std::int64_t piece = op.reversed ? pieces - 1 - i : i;
      const A* e = op.e.as<A>() + (piece * heads + h) * K * V;
      if (i == 0) {
        std::copy_n(e, K * V, state);
        continue;
      }
      std::copy_n(state, K * V, before.data());
      advance(
          state, op.m.as<A>() + (piece * heads + h) * K * K, before.data(), e, K, V, op.reversed);
    }
  });
}

}  // namespace

void launch(CpuContext& context, const KdaSegmentMap& op) {
  const Arena::Mark mark(context.scratch);
  const TensorView scratch = context.scratch.take(
      {context.pool.num_threads(), op.k.dim(2) * kColumns}, op.g.dtype(), "kda_segment.state");
  context.stream.enqueue([op, scratch, &pool = context.pool] {
    dispatch_float(op.k.dtype(), [&]<class T>(TypeTag<T>) { map<T>(pool, op, scratch); });
  });
}

void launch(CpuContext& context, const KdaSegmentGradient& op) {
  const Arena::Mark mark(context.scratch);
  const TensorView scratch = context.scratch.take(
      {context.pool.num_threads(), op.k.dim(2) * kColumns}, op.g.dtype(), "kda_segment.state");
  context.stream.enqueue([op, scratch, &pool = context.pool] {
    dispatch_float(op.k.dtype(), [&]<class T>(TypeTag<T>) { gradient<T>(pool, op, scratch); });
  });
}

void launch(CpuContext& context, const KdaSegmentChain& op) {
  const Arena::Mark mark(context.scratch);
  const TensorView scratch =
      context.scratch.take({context.pool.num_threads(), op.state.dim(1) * op.state.dim(2)},
                           op.state.dtype(),
                           "kda_segment.chain");
  context.stream.enqueue([op, scratch, &pool = context.pool] {
    op.state.dtype() == DType::f64 ? chain<double>(pool, op, scratch)
                                   : chain<float>(pool, op, scratch);
  });
}

}  // namespace moesaic
