#include "kernels/ops/rms_norm.h"

#include <cmath>

#include "kernels/cpu/norms.h"
#include "kernels/cpu/thread_pool.h"

namespace moesaic {
namespace {

constexpr std::int64_t kRowBlock = 64;  // rows per partial sum of dweight; part of the bits

template <class T, class W>
void normalise_row(const T* x, const W* w, std::int64_t hidden, acc_t<T> rho, T* y) {
  using A = acc_t<T>;
#pragma omp simd
  for (std::int64_t c = 0; c < hidden; ++c) {
    const T normalised(static_cast<A>(x[c]) * rho);
    y[c] = T(static_cast<A>(normalised) * static_cast<A>(w[c]));
  }
}

template <class T, class W>
void forward(ThreadPool& pool, const RmsNormForward& op) {
  using A = acc_t<T>;
  const std::int64_t hidden = op.x.dim(1);
  pool.parallel_for(op.x.dim(0), kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const T* row = op.x.as<T>() + t * hidden;
      const A rho = cpu::inverse_rms(row, hidden, static_cast<A>(op.eps));
      op.inv_rms.as<A>()[t] = rho;
      normalise_row(row, op.weight.as<W>(), hidden, rho, op.y.as<T>() + t * hidden);
    }
  });
}

// dx (+)= rho (dy w - x rho <dy w, x rho> / hidden). dx may be dy or x.
template <class T, class W, bool kAccumulate>
void backward_row(const T* x, const T* dy, const W* w, std::int64_t hidden, acc_t<T> rho, T* dx) {
  using A = acc_t<T>;
  A dot = 0;
#pragma omp simd reduction(+ : dot)
  for (std::int64_t c = 0; c < hidden; ++c)
    dot += static_cast<A>(dy[c]) * static_cast<A>(w[c]) * static_cast<A>(x[c]);
  const A mean = dot * rho / static_cast<A>(hidden);
#pragma omp simd
  for (std::int64_t c = 0; c < hidden; ++c) {
    const A v =
        rho * (static_cast<A>(dy[c]) * static_cast<A>(w[c]) - static_cast<A>(x[c]) * rho * mean);
    dx[c] = T(kAccumulate ? static_cast<A>(dx[c]) + v : v);
  }
}

template <class T, class W>
void backward(ThreadPool& pool, const RmsNormBackward& op) {
  const std::int64_t tokens = op.x.dim(0), hidden = op.x.dim(1);
  const auto row = op.accumulate_dx ? backward_row<T, W, true> : backward_row<T, W, false>;
  pool.parallel_for(tokens, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t at = t * hidden;
      row(op.x.as<T>() + at,
          op.dy.as<T>() + at,
          op.weight.as<W>(),
          hidden,
          op.inv_rms.as<acc_t<T>>()[t],
          op.dx.as<T>() + at);
    }
  });
}

// partial[c] += sum of dy[t, c] x[t, c] inv_rms[t] over the rows [t0, t1), columns [0, columns).
template <class T>
void add_weight_rows(const T* x,
                     const T* dy,
                     const acc_t<T>* inv_rms,
                     std::int64_t t0,
                     std::int64_t t1,
                     std::int64_t hidden,
                     std::int64_t columns,
                     acc_t<T>* partial) {
  using A = acc_t<T>;
  for (std::int64_t t = t0; t < t1; ++t) {
    const T* xr = x + t * hidden;
    const T* gr = dy + t * hidden;
    const A rho = inv_rms[t];
#pragma omp simd
    for (std::int64_t c = 0; c < columns; ++c)
      partial[c] += static_cast<A>(gr[c]) * static_cast<A>(xr[c]) * rho;
  }
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
      add_weight_rows(x + begin,
                      dy + begin,
                      inv_rms,
                      t0,
                      std::min(tokens, t0 + kRowBlock),
                      hidden,
                      end - begin,
                      partial);
      for (std::int64_t c = begin; c < end; ++c)
        dw[c] += partial[c - begin];
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
