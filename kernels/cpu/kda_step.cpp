#include <algorithm>

#include "kernels/cpu/math.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/ops/kda_chunk.h"

namespace moesaic {
namespace {

constexpr std::int64_t kColumns =
    64;  // columns of the state at a time; they do not depend on each other

/// Columns [c0, c0 + count) of one head's step.
template <class T>
void step_columns(const KdaStep& op, std::int64_t row, std::int64_t c0, std::int64_t count) {
  using A = acc_t<T>;
  const std::int64_t K = op.q.dim(2), V = op.v.dim(2);
  const T* q = op.q.as<T>() + row * K;
  const T* k = op.k.as<T>() + row * K;
  const A* g = op.g.as<A>() + row * K;
  const A* in = op.s_in.as<A>() + row * K * V + c0;
  A* out = op.s_out.as<A>() + row * K * V + c0;
  A read[kColumns] = {}, u[kColumns], o[kColumns] = {};
  for (std::int64_t i = 0; i < K; ++i) {
    const A alpha = cpu::exp(g[i]), key = static_cast<A>(k[i]);
#pragma omp simd
    for (std::int64_t j = 0; j < count; ++j) {
      out[i * V + j] = alpha * in[i * V + j];
      read[j] += out[i * V + j] * key;
    }
  }
  const A beta = op.beta.as<A>()[row];
  for (std::int64_t j = 0; j < count; ++j)
    u[j] = beta * (static_cast<A>(op.v.as<T>()[row * V + c0 + j]) - read[j]);
  for (std::int64_t i = 0; i < K; ++i) {
    const A key = static_cast<A>(k[i]), query = static_cast<A>(q[i]);
#pragma omp simd
    for (std::int64_t j = 0; j < count; ++j) {
      out[i * V + j] += key * u[j];
      o[j] += out[i * V + j] * query;
    }
  }
  for (std::int64_t j = 0; j < count; ++j)
    op.o.as<T>()[row * V + c0 + j] = T(o[j]);
}

}  // namespace

void launch(CpuContext& context, const KdaStep& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.q.dtype(), [&]<class T>(TypeTag<T>) {
      const std::int64_t V = op.v.dim(2);
      pool.parallel_for(op.q.dim(0) * op.q.dim(1), 1, [&](std::int64_t row, std::int64_t) {
        for (std::int64_t c0 = 0; c0 < V; c0 += kColumns)
          step_columns<T>(op, row, c0, std::min(kColumns, V - c0));
      });
    });
  });
}

}  // namespace moesaic
