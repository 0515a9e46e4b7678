#include "kernels/ops/kda_prepare.h"

#include "kernels/cpu/math.h"
#include "kernels/cpu/thread_pool.h"

namespace moesaic {
namespace {

constexpr std::int64_t kTokens =
    64;  // tokens per partial sum of the parameter gradients; part of the bits

inline double gate_softplus(double x) noexcept {
  return cpu::softplus(x);
}
/// log(1 + e^x) without a library call, so that loops vectorise: with y = e^-|x|, log(1 + y) = 2
/// atanh(y / (2 + y)), whose odd series in u <= 1/3 is cut after u^17 (remainder below 1e-9).
inline float gate_softplus(float x) noexcept {
  const float y = cpu::exp(x > 0.0F ? -x : x);
  const float u = y / (2.0F + y), s = u * u;
  float p = 1.0F / 17.0F;
  p = p * s + 1.0F / 15.0F;
  p = p * s + 1.0F / 13.0F;
  p = p * s + 1.0F / 11.0F;
  p = p * s + 1.0F / 9.0F;
  p = p * s + 1.0F / 7.0F;
  p = p * s + 1.0F / 5.0F;
  p = p * s + 1.0F / 3.0F;
  return (x > 0.0F ? x : 0.0F) + 2.0F * (u + u * s * p);
}

/// out = in * rstd * scale; returns rstd.
template <class T>
acc_t<T> normalise(T* out, const T* in, std::int64_t n, acc_t<T> scale, acc_t<T> eps) {
  using A = acc_t<T>;
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t c = 0; c < n; ++c)
    sum += static_cast<A>(in[c]) * static_cast<A>(in[c]);
  const A rstd = A(1) / std::sqrt(sum + eps);
  const A factor = rstd * scale;
#pragma omp simd
  for (std::int64_t c = 0; c < n; ++c)
    out[c] = T(static_cast<A>(in[c]) * factor);
  return rstd;
}

/// dx = rstd scale (dy - y <y, dy> / scale^2), where y is the scaled result.
template <class T>
void normalise_backward(
    T* dx, const T* dy, const T* y, std::int64_t n, acc_t<T> rstd, acc_t<T> scale) {
  using A = acc_t<T>;
  A dot = 0;
#pragma omp simd reduction(+ : dot)
  for (std::int64_t c = 0; c < n; ++c)
    dot += static_cast<A>(y[c]) * static_cast<A>(dy[c]);
  dot /= scale * scale;
  const A factor = rstd * scale;
#pragma omp simd
  for (std::int64_t c = 0; c < n; ++c)
    dx[c] = T(factor * (static_cast<A>(dy[c]) - static_cast<A>(y[c]) * dot));
}

template <class T>
void gate_row(acc_t<T>* g,
              const T* z,
              const acc_t<T>* bias,
              std::int64_t n,
              acc_t<T> scale,
              const std::optional<double>& g_min) {
  using A = acc_t<T>;
  if (g_min) {
    const A lowest = static_cast<A>(*g_min);
#pragma omp simd
    for (std::int64_t c = 0; c < n; ++c)
      g[c] = lowest * cpu::sigmoid(scale * (static_cast<A>(z[c]) + bias[c]));
  } else {
#pragma omp simd
    for (std::int64_t c = 0; c < n; ++c)
      g[c] = -scale * gate_softplus(static_cast<A>(z[c]) + bias[c]);
  }
}

/// Asks for the row that is read kAhead tokens later; rows of one head lie too far apart for the prefetcher.
template <class T>
inline void prefetch_row(const T* row, std::int64_t n, std::int64_t stride) noexcept {
  constexpr std::int64_t kAhead = 8, kLine = 64 / sizeof(T);
  for (std::int64_t c = 0; c < n; c += kLine)
    __builtin_prefetch(row + kAhead * stride + c);
}

/// dz of one row; adds to the partial sums of dt_bias and, channel by channel, of A_log.
template <class T>
void gate_row_backward(T* dz,
                       acc_t<T>* dbias,
                       acc_t<T>* da,
                       const acc_t<T>* dg,
                       const T* z,
                       const acc_t<T>* bias,
                       std::int64_t n,
                       acc_t<T> scale,
                       const std::optional<double>& g_min) {
  using A = acc_t<T>;
  if (g_min) {
    const A factor = scale * static_cast<A>(*g_min);
#pragma omp simd
    for (std::int64_t c = 0; c < n; ++c) {
      const A zb = static_cast<A>(z[c]) + bias[c];
      const A x = scale * zb;
      A s, complement;
      cpu::sigmoid_pair(x, s, complement);
      const A d = factor * s * complement * dg[c];
      dz[c] = T(d);
      dbias[c] += d;
      da[c] += zb * d;
    }
  } else {
#pragma omp simd
    for (std::int64_t c = 0; c < n; ++c) {
      const A zb = static_cast<A>(z[c]) + bias[c];
      const A d = -scale * cpu::sigmoid(zb) * dg[c];
      dz[c] = T(d);
      dbias[c] += d;
      da[c] -= scale * gate_softplus(zb) * dg[c];
    }
  }
}

template <class T, class B>
void forward(ThreadPool& pool, const KdaPrepareForward& op) {
  using A = acc_t<T>;
  const std::int64_t heads = op.q_raw.dim(1), size = op.q_raw.dim(2);
  const A* a_log = op.a_log.as<A>();
  const A* bias = op.dt_bias.as<A>();
  const A q_scale = A(1) / std::sqrt(static_cast<A>(size)), eps = static_cast<A>(op.eps);
  pool.parallel_for(op.q_raw.dim(0), kTokens, [&](std::int64_t first, std::int64_t last) {
    // Token by token, so that memory is read in order: a head's rows alone lie too far apart for the prefetcher.
    for (std::int64_t t = first; t < last; ++t) {
      for (std::int64_t h = 0; h < heads; ++h) {
        const A scale = std::exp(a_log[h]);
        const std::int64_t row = t * heads + h, at = row * size;
        op.q_rstd.as<A>()[row] =
            normalise(op.q.as<T>() + at, op.q_raw.as<T>() + at, size, q_scale, eps);
        op.k_rstd.as<A>()[row] =
            normalise(op.k.as<T>() + at, op.k_raw.as<T>() + at, size, A(1), eps);
        gate_row<T>(op.g.as<A>() + at, op.z.as<T>() + at, bias + h * size, size, scale, op.g_min);
        op.beta.as<A>()[row] = cpu::sigmoid(static_cast<A>(op.beta_logit.as<B>()[row]));
      }
    }
  });
}

template <class T>
void gate_backward(const KdaPrepareBackward& op, std::int64_t h, acc_t<T>* scratch) {
  using A = acc_t<T>;
  const std::int64_t tokens = op.q.dim(0), heads = op.q.dim(1), size = op.q.dim(2);
  const A* bias = op.dt_bias.as<A>() + h * size;
  const A scale = std::exp(op.a_log.as<A>()[h]);
  A* dbias = scratch;  // partial sums of one block of tokens
  A* da = scratch + size;
  for (std::int64_t t0 = 0; t0 < tokens; t0 += kTokens) {
    std::fill_n(scratch, 2 * size, A(0));
    for (std::int64_t t = t0; t < std::min(tokens, t0 + kTokens); ++t) {
      const std::int64_t at = (t * heads + h) * size;
      prefetch_row(op.dg.as<A>() + at, size, heads * size);
      prefetch_row(op.z.as<T>() + at, size, heads * size);
      gate_row_backward<T>(op.dz.as<T>() + at,
                           dbias,
                           da,
                           op.dg.as<A>() + at,
                           op.z.as<T>() + at,
                           bias,
                           size,
                           scale,
                           op.g_min);
    }
    if (!op.ddt_bias.empty()) {
      A* total = op.ddt_bias.as<A>() + h * size;
      for (std::int64_t c = 0; c < size; ++c)
        total[c] += dbias[c];
    }
    if (!op.da_log.empty()) {
      A sum = 0;
      for (std::int64_t c = 0; c < size; ++c)
        sum += da[c];
      op.da_log.as<A>()[h] += sum;
    }
  }
}

template <class T, class B>
void backward(ThreadPool& pool, const KdaPrepareBackward& op, acc_t<T>* scratch) {
  using A = acc_t<T>;
  const std::int64_t tokens = op.q.dim(0), heads = op.q.dim(1), size = op.q.dim(2);
  const A q_scale = A(1) / std::sqrt(static_cast<A>(size));
  pool.parallel_for(heads, 1, [&](std::int64_t h, std::int64_t) {
    gate_backward<T>(op, h, scratch + h * 2 * size);
  });
  pool.parallel_for(tokens, kTokens, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first * heads; row < last * heads; ++row) {
      const std::int64_t at = row * size;
      normalise_backward(op.dq_raw.as<T>() + at,
                         op.dq.as<T>() + at,
                         op.q.as<T>() + at,
                         size,
                         op.q_rstd.as<A>()[row],
                         q_scale);
      normalise_backward(op.dk_raw.as<T>() + at,
                         op.dk.as<T>() + at,
                         op.k.as<T>() + at,
                         size,
                         op.k_rstd.as<A>()[row],
                         A(1));
      const A x = static_cast<A>(op.beta_logit.as<B>()[row]);
      op.dbeta_logit.as<B>()[row] = B(op.dbeta.as<A>()[row] * cpu::sigmoid(x) * cpu::sigmoid(-x));
    }
  });
}

}  // namespace

void launch(CpuContext& context, const KdaPrepareForward& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.q_raw.dtype(), [&]<class T>(TypeTag<T>) {
      dispatch_weight<T>(op.beta_logit.dtype(),
                         [&]<class B>(TypeTag<B>) { forward<T, B>(pool, op); });
    });
  });
}

void launch(CpuContext& context, const KdaPrepareBackward& op) {
  const Arena::Mark mark(context.scratch);
  const DType wide = op.q.dtype() == DType::f64 ? DType::f64 : DType::f32;
  const auto partial =
      context.scratch.take({op.q.dim(1), 2, op.q.dim(2)}, wide, "kda_prepare.partial");
  context.stream.enqueue([op, partial, &pool = context.pool] {
    dispatch_float(op.q.dtype(), [&]<class T>(TypeTag<T>) {
      dispatch_weight<T>(op.beta_logit.dtype(), [&]<class B>(TypeTag<B>) {
        backward<T, B>(pool, op, partial.as<acc_t<T>>());
      });
    });
  });
}

}  // namespace moesaic
