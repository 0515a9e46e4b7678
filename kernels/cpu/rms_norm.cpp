#include "kernels/ops/rms_norm.h"

#include <cmath>

#include "kernels/cpu/thread_pool.h"

namespace moesaic {
namespace {

constexpr std::int64_t kRowBlock = 64;  // rows per partial sum of dweight; part of the bits

template <class T, class W>
void forward(ThreadPool& pool, const RmsNormForward& op) {
  using A = acc_t<T>;
  const std::int64_t hidden = op.x.dim(1);
  const auto* x = op.x.as<T>();
  const auto* w = op.weight.as<W>();
  auto* y = op.y.as<T>();
  auto* inv_rms = op.inv_rms.as<A>();
  pool.parallel_for(op.x.dim(0), kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const T* row = x + t * hidden;
      T* out = y + t * hidden;
      A sum = 0;
      for (std::int64_t c = 0; c < hidden; ++c) sum += static_cast<A>(row[c]) * static_cast<A>(row[c]);
      const A rho = A(1) / std::sqrt(sum / static_cast<A>(hidden) + static_cast<A>(op.eps));
      inv_rms[t] = rho;
      for (std::int64_t c = 0; c < hidden; ++c) {
        const T normalised(static_cast<A>(row[c]) * rho);
        out[c] = T(static_cast<A>(normalised) * static_cast<A>(w[c]));
      }
    }
  });
}

template <class T, class W>
void backward(ThreadPool& pool, const RmsNormBackward& op) {
  using A = acc_t<T>;
  const std::int64_t tokens = op.x.dim(0), hidden = op.x.dim(1);
  const auto* x = op.x.as<T>();
  const auto* dy = op.dy.as<T>();
  const auto* w = op.weight.as<W>();
  const auto* inv_rms = op.inv_rms.as<A>();
  auto* dx = op.dx.as<T>();
  pool.parallel_for(tokens, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const T* xr = x + t * hidden;
      const T* gr = dy + t * hidden;
      T* out = dx + t * hidden;
      const A rho = inv_rms[t];
      A dot = 0;
      for (std::int64_t c = 0; c < hidden; ++c) dot += static_cast<A>(gr[c]) * static_cast<A>(w[c]) * static_cast<A>(xr[c]);
      const A mean = dot * rho / static_cast<A>(hidden);
      for (std::int64_t c = 0; c < hidden; ++c) {
        const A v = rho * (static_cast<A>(gr[c]) * static_cast<A>(w[c]) - static_cast<A>(xr[c]) * rho * mean);
        out[c] = T(op.accumulate_dx ? static_cast<A>(out[c]) + v : v);
      }
    }
  });
}

// dweight needs dy, which dx may overwrite: it runs first. Columns are shared out, so each sum has one owner.
template <class T>
void weight_gradient(ThreadPool& pool, const RmsNormBackward& op) {
  using A = acc_t<T>;
  const std::int64_t tokens = op.x.dim(0), hidden = op.x.dim(1);
  const auto* x = op.x.as<T>();
  const auto* dy = op.dy.as<T>();
  const auto* inv_rms = op.inv_rms.as<A>();
  auto* dw = op.dweight.as<A>();
  constexpr std::int64_t kColumns = 64;
  pool.parallel_for(hidden, kColumns, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t0 = 0; t0 < tokens; t0 += kRowBlock) {
      A partial[kColumns] = {};
      for (std::int64_t t = t0; t < std::min(tokens, t0 + kRowBlock); ++t) {
        for (std::int64_t c = begin; c < end; ++c) {
          partial[c - begin] += static_cast<A>(dy[t * hidden + c]) * static_cast<A>(x[t * hidden + c]) * inv_rms[t];
        }
      }
      for (std::int64_t c = begin; c < end; ++c) dw[c] += partial[c - begin];
    }
  });
}

}  // namespace

void launch(CpuContext& context, const RmsNormForward& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
      dispatch_weight<T>(op.weight.dtype(), [&]<class W>(TypeTag<W>) { forward<T, W>(pool, op); });
    });
  });
}

void launch(CpuContext& context, const RmsNormBackward& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
      if (!op.dweight.empty()) weight_gradient<T>(pool, op);
      dispatch_weight<T>(op.weight.dtype(), [&]<class W>(TypeTag<W>) { backward<T, W>(pool, op); });
    });
  });
}

}  // namespace moesaic
