#pragma once
// The operands of the KDA core row by row: a few lanes of a warp share a row of one head.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/kda_gate.cuh"

namespace moesaic::cuda::prepare {

constexpr int kThreads = 256;

template <int Lanes, class A>
__device__ __forceinline__ A lanes_sum(A x) {
#pragma unroll
  for (int offset = Lanes / 2; offset > 0; offset /= 2)
    x += __shfl_xor_sync(0xffffffffU, x, offset);
  return x;
}

/// A row of one head, as the lane at hand sees it: pieces of N channels from lane * N on. Once: there is one piece at most,
/// so that it stays in registers between its uses, and all loads can be asked for at the start.
template <int N, int Lanes, bool Once>
struct RowPieces {
  std::int64_t size;
  int lane;

  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
    if constexpr (Once) {
      if (lane * N < size) f(lane * N);
    } else {
      for (std::int64_t c = lane * N; c < size; c += Lanes * N)
        f(c);
    }
  }
  /// What a lane holds of a row from the start on; nothing unless Once. `valid`: the row exists.
  template <class T>
  __device__ __forceinline__ Vec<T, N> ahead(const T* row, bool valid) const {
    if (Once && valid && lane * N < size) return load<N>(row + lane * N);
    return {};
  }
  template <class T>
  __device__ __forceinline__ Vec<T, N> piece(const Vec<T, N>& ahead,
                                             const T* row,
                                             std::int64_t c) const {
    if constexpr (Once) return ahead;
    return load<N>(row + c);
  }
};

/// Rows one after the other, all of a warp's together: f(row, its head, whether it exists).
template <int Rows, class F>
__device__ __forceinline__ void for_rows(std::int64_t rows, std::int64_t heads, const F& f) {
  const std::int64_t step = std::int64_t{gridDim.x} * Rows, first = std::int64_t{blockIdx.x} * Rows;
  const int own = static_cast<int>(threadIdx.x) * Rows / kThreads;
  std::int64_t h = (first + own) % heads;
  const std::int64_t h_step = step % heads;
  for (std::int64_t r = first; r < rows; r += step) {
    f(r + own, h, r + own < rows);
    h += h_step;
    if (h >= heads) h -= heads;
  }
}

/// out = in * rstd * scale; returns rstd. `valid`: the row exists (all lanes take part in the sum).
template <class T, class A, int N, int Lanes, bool Once>
__device__ __forceinline__ A normalise(T* out,
                                       const T* in,
                                       const Vec<T, N>& ahead,
                                       const RowPieces<N, Lanes, Once>& row,
                                       bool valid,
                                       A scale,
                                       A eps) {
  A sum = 0;
  if (valid) {
    row.each([&](std::int64_t c) {
      const auto x = row.piece(ahead, in, c);
#pragma unroll
      for (int i = 0; i < N; ++i)
        sum += widen<A>(x.v[i]) * widen<A>(x.v[i]);
    });
  }
  const A rstd = A(1) / sqrt(lanes_sum<Lanes>(sum) + eps);
  const A factor = rstd * scale;
  if (valid) {
    row.each([&](std::int64_t c) {
      auto x = row.piece(ahead, in, c);
#pragma unroll
      for (int i = 0; i < N; ++i)
        x.v[i] = round_to<T>(widen<A>(x.v[i]) * factor);
      store<N>(out + c, x);
    });
  }
  return rstd;
}

template <class T, class A>
struct GateArguments {
  const T* z;
  const A* a_log;
  const A* bias;
  A g_min;
  bool bounded;
};

template <class T, class A>
__device__ __forceinline__ A gate(const GateArguments<T, A>& gate, A zb, A scale) {
  if (gate.bounded) return gate.g_min * kda::sigmoid<kda::kFastMath<T>>(scale * zb);
  return -scale * kda::softplus<kda::kFastMath<T>>(zb);
}

template <class T, class A>
struct ForwardRows {
  T *q, *k;
  A *g, *q_rstd, *k_rstd, *beta;
  const T *q_raw, *k_raw;
  std::int64_t rows, heads, size;
  A q_scale, eps;
};

// q may be q_raw, k may be k_raw: a lane reads what it overwrites itself, before.
template <class T, class B, class A, int N, int Lanes, bool Once>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(ForwardRows<T, A> io, GateArguments<T, A> gates, const B* beta_logit) {
  const RowPieces<N, Lanes, Once> row{io.size, static_cast<int>(threadIdx.x) % Lanes};
  for_rows<kThreads / Lanes>(io.rows, io.heads, [&](std::int64_t r, std::int64_t h, bool valid) {
    const std::int64_t at = r * io.size;
    const auto q_ahead = row.ahead(io.q_raw + at, valid), k_ahead = row.ahead(io.k_raw + at, valid),
               z_ahead = row.ahead(gates.z + at, valid);
    const auto bias_ahead = row.ahead(gates.bias + h * io.size, valid);
    const A scale = exp(gates.a_log[h]);
    const A q_rstd = normalise(io.q + at, io.q_raw + at, q_ahead, row, valid, io.q_scale, io.eps);
    const A k_rstd = normalise(io.k + at, io.k_raw + at, k_ahead, row, valid, A(1), io.eps);
    if (!valid) return;
    row.each([&](std::int64_t c) {
      const auto z = row.piece(z_ahead, gates.z + at, c);
      const auto bias = row.piece(bias_ahead, gates.bias + h * io.size, c);
      Vec<A, N> g;
#pragma unroll
      for (int i = 0; i < N; ++i)
        g.v[i] = gate(gates, widen<A>(z.v[i]) + bias.v[i], scale);
      store<N>(io.g + at + c, g);
    });
    if (row.lane == 0) {
      io.q_rstd[r] = q_rstd;
      io.k_rstd[r] = k_rstd;
      io.beta[r] = kda::sigmoid<kda::kFastMath<T>>(widen<A>(beta_logit[r]));
    }
  });
}

/// dx = rstd scale (dy - y <y, dy> / scale^2), where y is the scaled result.
template <class T, class A, int N, int Lanes, bool Once>
__device__ __forceinline__ void normalise_backward(T* dx,
                                                   const T* dy,
                                                   const T* y,
                                                   const Vec<T, N>& dy_ahead,
                                                   const Vec<T, N>& y_ahead,
                                                   const RowPieces<N, Lanes, Once>& row,
                                                   bool valid,
                                                   A rstd,
                                                   A scale) {
  A dot = 0;
  if (valid) {
    row.each([&](std::int64_t c) {
      const auto yv = row.piece(y_ahead, y, c), d = row.piece(dy_ahead, dy, c);
#pragma unroll
      for (int i = 0; i < N; ++i)
        dot += widen<A>(yv.v[i]) * widen<A>(d.v[i]);
    });
  }
  dot = lanes_sum<Lanes>(dot) / (scale * scale);
  if (!valid) return;
  const A factor = rstd * scale;
  row.each([&](std::int64_t c) {
    const auto yv = row.piece(y_ahead, y, c);
    auto d = row.piece(dy_ahead, dy, c);
#pragma unroll
    for (int i = 0; i < N; ++i)
      d.v[i] = round_to<T>(factor * (widen<A>(d.v[i]) - widen<A>(yv.v[i]) * dot));
    store<N>(dx + c, d);
  });
}

template <class T, class A>
struct BackwardRows {
  T *dq_raw, *dk_raw;
  const T *dq, *dk, *q, *k;
  const A *q_rstd, *k_rstd, *dbeta;
  std::int64_t rows, size;
  A q_scale;
};

template <class T, class B, class A, int N, int Lanes, bool Once>
__global__ void __launch_bounds__(kThreads)
    rows_backward_kernel(BackwardRows<T, A> io, B* dbeta_logit, const B* beta_logit) {
  const RowPieces<N, Lanes, Once> row{io.size, static_cast<int>(threadIdx.x) % Lanes};
  for_rows<kThreads / Lanes>(io.rows, 1, [&](std::int64_t r, std::int64_t, bool valid) {
    const std::int64_t at = r * io.size;
    const auto dq = row.ahead(io.dq + at, valid), q = row.ahead(io.q + at, valid),
               dk = row.ahead(io.dk + at, valid), k = row.ahead(io.k + at, valid);
    const A q_rstd = valid ? io.q_rstd[r] : A(0), k_rstd = valid ? io.k_rstd[r] : A(0);
    normalise_backward(
        io.dq_raw + at, io.dq + at, io.q + at, dq, q, row, valid, q_rstd, io.q_scale);
    normalise_backward(io.dk_raw + at, io.dk + at, io.k + at, dk, k, row, valid, k_rstd, A(1));
    if (valid && row.lane == 0) {
      A s, complement;
      kda::sigmoid_pair<kda::kFastMath<T>>(widen<A>(beta_logit[r]), s, complement);
      dbeta_logit[r] = round_to<B>(io.dbeta[r] * s * complement);
    }
  });
}

}  // namespace moesaic::cuda::prepare
