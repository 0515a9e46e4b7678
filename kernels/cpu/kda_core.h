#pragma once
// Forward and backward of one chunk of one head (SPEC 1.4, 1.5, 1.7), on padded tiles in the
// accumulation type. All decays are products of token decays between a token and a tile border, so
// every factor lies in [0, 1].
#include <cmath>
#include <limits>

#include "kernels/cpu/kda_workspace.h"
#include "kernels/cpu/math.h"

namespace moesaic::cpu {

/// A log decay below this one counts as minus infinity: its exponential is no normal number.
template <class A>
constexpr A kKdaDecayFloor = sizeof(A) == 8 ? A(-708) : A(-87);
/// Below this one its gradient, at most e^g times the scale of the terms it is summed from, is less
/// than their rounding errors, and is returned as 0: -e^A softplus'(z) would multiply noise by |g|.
template <class A>
constexpr A kKdaGradientFloor = sizeof(A) == 8 ? A(-45) : A(-20);

/// Asks for a row a few rows ahead: rows of one head lie far apart, where the processor's own
/// prefetching does not see them.
template <class T>
inline void prefetch_row(
    const T* in, std::int64_t r, std::int64_t n, std::int64_t width, std::int64_t stride) noexcept {
  constexpr std::int64_t kAhead = 8, kLine = 64 / static_cast<std::int64_t>(sizeof(T));
  if (r + kAhead >= n) return;
  for (std::int64_t c = 0; c < width; c += kLine)
    __builtin_prefetch(in + (r + kAhead) * stride + c);
}

/// Copies n rows of `width` elements, `stride` apart, into padded rows; the rest of `rows` x
/// `padded` becomes `fill`.
template <class A, class T>
void gather_rows(A* out,
                 std::int64_t ld,
                 std::int64_t rows,
                 std::int64_t padded,
                 const T* in,
                 std::int64_t n,
                 std::int64_t width,
                 std::int64_t stride) noexcept {
  for (std::int64_t r = 0; r < n; ++r) {
    prefetch_row(in, r, n, width, stride);
#pragma omp simd
    for (std::int64_t c = 0; c < width; ++c)
      out[r * ld + c] = static_cast<A>(in[r * stride + c]);
    for (std::int64_t c = width; c < padded; ++c)
      out[r * ld + c] = A(0);
  }
  for (std::int64_t r = n; r < rows; ++r)
    std::fill_n(out + r * ld, padded, A(0));
}

template <class A, class T>
void scatter_rows(T* out,
                  std::int64_t stride,
                  const A* in,
                  std::int64_t ld,
                  std::int64_t n,
                  std::int64_t width) noexcept {
  for (std::int64_t r = 0; r < n; ++r) {
#pragma omp simd
    for (std::int64_t c = 0; c < width; ++c)
      out[r * stride + c] = T(in[r * ld + c]);
  }
}

template <class A>
inline void multiply_row(A* out, const A* a, const A* b, std::int64_t n) noexcept {
#pragma omp simd
  for (std::int64_t c = 0; c < n; ++c)
    out[c] = a[c] * b[c];
}

/// A head's rows of the op's tensors from the chunk's first token on. Rows of q, k, g are H K
/// apart, of v H V, of beta H.
template <class T>
struct KdaChunkInput {
  using A = acc_t<T>;
  const T *q, *k, *v;
  const A *g, *beta;
  std::int64_t heads, tokens;
};

template <class A, class T>
void kda_load(const KdaSizes& n, const KdaChunkInput<T>& in, KdaChunkData<A>& d) noexcept {
  d.tokens = in.tokens;
  d.rows = (in.tokens + kKdaTile - 1) / kKdaTile * kKdaTile;
  gather_rows(d.q, n.ldk, d.rows, n.Kp, in.q, d.tokens, n.K, in.heads * n.K);
  gather_rows(d.k, n.ldk, d.rows, n.Kp, in.k, d.tokens, n.K, in.heads * n.K);
  gather_rows(d.v, n.ldv, d.rows, n.Vp, in.v, d.tokens, n.V, in.heads * n.V);
  for (std::int64_t r = 0; r < d.rows; ++r) {
    A* alpha = d.alpha + r * n.ldk;
    d.beta[r] = r < d.tokens ? in.beta[r * in.heads] : A(0);
    std::fill_n(alpha, n.Kp, A(1));  // padding changes no state
    if (r >= d.tokens) continue;
    const A* g = in.g + r * in.heads * n.K;
    prefetch_row(in.g, r, d.tokens, n.K, in.heads * n.K);
#pragma omp simd
    for (std::int64_t c = 0; c < n.K; ++c) {
      const A e = cpu::exp(g[c]);
      alpha[c] = g[c] < kKdaDecayFloor<A> ? A(0) : e;
    }
  }
}

/// Decays to and from tile borders, and the scaled rows.
template <class A>
void kda_decays(const KdaSizes& n, KdaChunkData<A>& d) noexcept {
  const std::int64_t w = n.Kp;
  for (std::int64_t t = 0; t < d.tiles(); ++t) {
    const std::int64_t begin = t * kKdaTile, end = begin + kKdaTile;
    for (std::int64_t r = begin; r < end; ++r) {
      A* first = d.first + r * n.ldk;
      const A* alpha = d.alpha + r * n.ldk;
      if (r == begin) {
        std::copy_n(alpha, w, first);
      } else {
        multiply_row(first, first - n.ldk, alpha, w);
      }
    }
    std::fill_n(d.rest + (end - 1) * n.ldk, w, A(1));
    for (std::int64_t r = end - 2; r >= begin; --r) {
      multiply_row(d.rest + r * n.ldk, d.rest + (r + 1) * n.ldk, d.alpha + (r + 1) * n.ldk, w);
    }
    std::copy_n(d.first + (end - 1) * n.ldk, w, d.tile + t * n.ldk);
    if (t == 0) {
      std::fill_n(d.before, w, A(1));
    } else {
      multiply_row(d.before + t * n.ldk, d.before + (t - 1) * n.ldk, d.tile + (t - 1) * n.ldk, w);
    }
  }
  const std::int64_t last = d.tiles() - 1;
  multiply_row(d.total, d.before + last * n.ldk, d.tile + last * n.ldk, w);
  for (std::int64_t r = 0; r < d.rows; ++r) {
    const std::int64_t at = r * n.ldk;
    const A* before = d.before + r / kKdaTile * n.ldk;
    multiply_row(d.q_row + at, d.q + at, d.first + at, w);
    multiply_row(d.k_row + at, d.k + at, d.first + at, w);
    multiply_row(d.q_hat + at, d.q_row + at, before, w);
    multiply_row(d.k_hat + at, d.k_row + at, before, w);
  }
}

/// A and P, the inverses of the diagonal tiles, and k_columns scaled to the chunk's end (Kb^T).
template <class A>
void kda_triangles(const KdaSizes& n, KdaChunkData<A>& d, const KdaRecord<A>& rec) noexcept {
  for (std::int64_t t = 0; t < d.tiles(); ++t) {
    const std::int64_t begin = t * kKdaTile, at = begin * n.ldk;
    A* a = rec.a + begin * n.C;
    A* p = rec.p + begin * n.C;
    if (t > 0) {
      tile_gemm<Update::set>(
          kKdaTile, begin, n.K, Operand<A>{d.k_row + at, n.ldk}, d.k_columns, n.ldc, a, n.C);
      tile_gemm<Update::set>(
          kKdaTile, begin, n.K, Operand<A>{d.q_row + at, n.ldk}, d.k_columns, n.ldc, p, n.C);
    }
    kda_tile_forward<A>(
        {d.q + at, d.k + at, d.alpha + at, n.ldk, n.Kp}, d.decayed, a + begin, p + begin, n.C);
    kda_tile_inverse<A>(a + begin, n.C, nullptr, d.beta + begin, rec.inverse + begin * kKdaTile);
    for (std::int64_t c = 0; c < n.Kp; ++c) {
      A* column = d.k_columns + c * n.ldc;
      const A decay = d.tile[t * n.ldk + c];
#pragma omp simd
      for (std::int64_t i = 0; i < begin; ++i)
        column[i] *= decay;
    }
    for (std::int64_t r = begin; r < begin + kKdaTile; ++r)
      multiply_row(d.decayed + (r - begin) * n.ldk, d.k + r * n.ldk, d.rest + r * n.ldk, n.Kp);
    transpose(kKdaTile, n.Kp, d.decayed, n.ldk, d.k_columns + begin, n.ldc);
  }
}

/// U = diag(beta) W.
template <class A>
void kda_scale_by_beta(const KdaSizes& n,
                       const KdaChunkData<A>& d,
                       const A* w,
                       A* u,
                       std::int64_t begin,
                       std::int64_t end) noexcept {
  for (std::int64_t r = begin; r < end; ++r) {
    const A beta = d.beta[r];
#pragma omp simd
    for (std::int64_t c = 0; c < n.Vp; ++c)
      u[r * n.ldv + c] = beta * w[r * n.ldv + c];
  }
}

/// W and U by block forward substitution; v becomes R minus what earlier tiles correct.
template <class A>
void kda_corrections(const KdaSizes& n,
                     KdaChunkData<A>& d,
                     const KdaRecord<A>& rec,
                     const A* s) noexcept {
  tile_gemm<Update::subtract>(d.rows, n.Vp, n.K, Operand<A>{d.k_hat, n.ldk}, s, n.ldv, d.v, n.ldv);
  for (std::int64_t t = 0; t < d.tiles(); ++t) {
    const std::int64_t begin = t * kKdaTile, at = begin * n.ldv;
    if (t > 0)
      tile_gemm<Update::subtract>(
          kKdaTile, n.Vp, begin, Operand<A>{rec.a + begin * n.C, n.C}, d.u, n.ldv, d.v + at, n.ldv);
    tile_gemm<Update::set>(kKdaTile,
                           n.Vp,
                           kKdaTile,
                           Operand<A>{rec.inverse + begin * kKdaTile, kKdaTile},
                           d.v + at,
                           n.ldv,
                           rec.w + at,
                           n.ldv);
    kda_scale_by_beta(n, d, rec.w, d.u, begin, begin + kKdaTile);
  }
}

/// O = Qh S + P U into `o` [C, ldv].
template <class A>
void kda_output(const KdaSizes& n,
                const KdaChunkData<A>& d,
                const KdaRecord<A>& rec,
                const A* s,
                A* o) noexcept {
  tile_gemm<Update::set>(d.rows, n.Vp, n.K, Operand<A>{d.q_hat, n.ldk}, s, n.ldv, o, n.ldv);
  for (std::int64_t t = 0; t < d.tiles(); ++t) {
    const std::int64_t begin = t * kKdaTile;
    tile_gemm<Update::add>(kKdaTile,
                           n.Vp,
                           begin + kKdaTile,
                           Operand<A>{rec.p + begin * n.C, n.C},
                           d.u,
                           n.ldv,
                           o + begin * n.ldv,
                           n.ldv);
  }
}

template <class A>
void kda_decay_state(const KdaSizes& n, const A* total, A* s) noexcept {
  for (std::int64_t c = 0; c < n.Kp; ++c) {
#pragma omp simd
    for (std::int64_t j = 0; j < n.Vp; ++j)
      s[c * n.ldv + j] *= total[c];
  }
}

/// S = diag(e^G_C) S + Kb^T U.
template <class A>
void kda_advance(const KdaSizes& n, const KdaChunkData<A>& d, A* s) noexcept {
  kda_decay_state(n, d.total, s);
  tile_gemm<Update::add>(n.Kp, n.Vp, d.rows, Operand<A>{d.k_columns, n.ldc}, d.u, n.ldv, s, n.ldv);
}

}  // namespace moesaic::cpu
