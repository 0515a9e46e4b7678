#pragma once
// Backward of one chunk of one head (SPEC 1.7); see kda_core.h for the scaling of rows and columns.
#include "kernels/cpu/kda_core.h"

namespace moesaic::cpu {

/// Kb = K scaled to the chunk's end, row by row.
template <class A>
void kda_keys_to_end(const KdaSizes& n, KdaChunkData<A>& d, A* out) noexcept {
  for (std::int64_t t = d.tiles() - 1; t >= 0; --t) {
    A* after = d.after + t * n.ldk;
    if (t == d.tiles() - 1) {
      std::fill_n(after, n.Kp, A(1));
    } else {
      multiply_row(after, after + n.ldk, d.tile + (t + 1) * n.ldk, n.Kp);
    }
    for (std::int64_t r = t * kKdaTile; r < (t + 1) * kKdaTile; ++r) {
      multiply_row(out + r * n.ldk, d.k + r * n.ldk, d.rest + r * n.ldk, n.Kp);
      multiply_row(out + r * n.ldk, out + r * n.ldk, after, n.Kp);
    }
  }
}

/// dU = P^T dO + Kb dS', then Y = X^-T dU and dR = diag(beta) Y from the last tile to the first;
/// dbeta_r = <Y_r, W_r>.
template <class A>
void kda_correction_gradients(const KdaSizes& n,
                              KdaChunkData<A>& d,
                              const KdaRecord<A>& rec,
                              KdaChunkGradients<A>& gr) noexcept {
  tile_gemm<Update::set>(d.rows, n.Vp, n.K, Operand<A>{gr.keys, n.ldk}, gr.ds, n.ldv, gr.du, n.ldv);
  for (std::int64_t t = d.tiles() - 1; t >= 0; --t) {
    const std::int64_t begin = t * kKdaTile, end = begin + kKdaTile, at = begin * n.ldv;
    tile_gemm<Update::add>(kKdaTile,
                           n.Vp,
                           d.rows - begin,
                           Operand<A>{rec.p + begin * n.C + begin, 1, n.C},
                           gr.d_o + at,
                           n.ldv,
                           gr.du + at,
                           n.ldv);
    if (end < d.rows) {
      tile_gemm<Update::subtract>(kKdaTile,
                                  n.Vp,
                                  d.rows - end,
                                  Operand<A>{rec.a + end * n.C + begin, 1, n.C},
                                  gr.du + end * n.ldv,
                                  n.ldv,
                                  gr.du + at,
                                  n.ldv);
    }
    kda_tile_inverse<A>(rec.a + begin * n.C + begin, n.C, d.beta + begin, nullptr, gr.inverse);
    tile_gemm<Update::set>(kKdaTile,
                           n.Vp,
                           kKdaTile,
                           Operand<A>{gr.inverse, 1, kKdaTile},
                           gr.du + at,
                           n.ldv,
                           gr.y,
                           n.ldv);
    for (std::int64_t r = begin; r < end; ++r) {
      const A* y = gr.y + (r - begin) * n.ldv;
      const A* w = rec.w + r * n.ldv;
      const A beta = d.beta[r];
      A dot = 0;
#pragma omp simd reduction(+ : dot)
      for (std::int64_t c = 0; c < n.Vp; ++c)
        dot += y[c] * w[c];
      gr.dbeta[r] = dot;
#pragma omp simd
      for (std::int64_t c = 0; c < n.Vp; ++c)
        gr.du[r * n.ldv + c] = beta * y[c];
    }
  }
}

/// dP and dA (lower tiles), dQh, dKh, dKb and the gradient of the chunk's decay.
template <class A>
void kda_operand_gradients(const KdaSizes& n,
                           KdaChunkData<A>& d,
                           const KdaRecord<A>& rec,
                           KdaChunkGradients<A>& gr) noexcept {
  transpose(d.rows, n.Vp, d.u, n.ldv, gr.u_columns, n.ldc);
  transpose(n.Kp, n.Vp, rec.s, n.ldv, gr.s_columns, n.ldk);
  transpose(n.Kp, n.Vp, gr.ds, n.ldv, gr.ds_columns, n.ldk);
  for (std::int64_t t = 0; t < d.tiles(); ++t) {
    const std::int64_t begin = t * kKdaTile, width = begin + kKdaTile, at = begin * n.ldv;
    tile_gemm<Update::set>(kKdaTile,
                           width,
                           n.V,
                           Operand<A>{gr.d_o + at, n.ldv},
                           gr.u_columns,
                           n.ldc,
                           gr.dp + begin * n.C,
                           n.C);
    tile_gemm<Update::set_negative>(kKdaTile,
                                    width,
                                    n.V,
                                    Operand<A>{gr.du + at, n.ldv},
                                    gr.u_columns,
                                    n.ldc,
                                    gr.da + begin * n.C,
                                    n.C);
  }
  tile_gemm<Update::set>(
      d.rows, n.Kp, n.V, Operand<A>{gr.d_o, n.ldv}, gr.s_columns, n.ldk, gr.dq, n.ldk);
  tile_gemm<Update::set_negative>(
      d.rows, n.Kp, n.V, Operand<A>{gr.du, n.ldv}, gr.s_columns, n.ldk, gr.krow, n.ldk);
  tile_gemm<Update::set>(
      d.rows, n.Kp, n.V, Operand<A>{d.u, n.ldv}, gr.ds_columns, n.ldk, gr.kcol, n.ldk);
  for (std::int64_t c = 0; c < n.Kp; ++c) {
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t j = 0; j < n.Vp; ++j)
      sum += rec.s[c * n.ldv + j] * gr.ds[c * n.ldv + j];
    gr.d_total[c] = d.total[c] * sum;
  }
  for (std::int64_t r = 0; r < d.rows; ++r) {
#pragma omp simd
    for (std::int64_t c = 0; c < n.Kp; ++c)
      gr.d_total[c] += gr.keys[r * n.ldk + c] * gr.kcol[r * n.ldk + c];
  }
}

/// dq and krow: the state's part, then earlier tiles, then the tile itself. `keys` are rescaled
/// tile by tile.
template <class A>
void kda_row_gradients(const KdaSizes& n, KdaChunkData<A>& d, KdaChunkGradients<A>& gr) noexcept {
  for (std::int64_t t = 0; t < d.tiles(); ++t) {
    const std::int64_t begin = t * kKdaTile, end = begin + kKdaTile, at = begin * n.ldk;
    for (std::int64_t r = begin; r < end; ++r) {
      multiply_row(gr.dq + r * n.ldk, gr.dq + r * n.ldk, d.before + t * n.ldk, n.Kp);
      multiply_row(gr.krow + r * n.ldk, gr.krow + r * n.ldk, d.before + t * n.ldk, n.Kp);
    }
    if (t > 0) {
      tile_gemm<Update::add>(kKdaTile,
                             n.Kp,
                             begin,
                             Operand<A>{gr.dp + begin * n.C, n.C},
                             gr.keys,
                             n.ldk,
                             gr.dq + at,
                             n.ldk);
      tile_gemm<Update::add>(kKdaTile,
                             n.Kp,
                             begin,
                             Operand<A>{gr.da + begin * n.C, n.C},
                             gr.keys,
                             n.ldk,
                             gr.krow + at,
                             n.ldk);
    }
    for (std::int64_t r = 0; r < begin; ++r)
      multiply_row(gr.keys + r * n.ldk, gr.keys + r * n.ldk, d.tile + t * n.ldk, n.Kp);
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int64_t row = r * n.ldk;
      multiply_row(gr.keys + row, d.k + row, d.rest + row, n.Kp);
      multiply_row(gr.dq + row, gr.dq + row, d.first + row, n.Kp);
      multiply_row(gr.krow + row, gr.krow + row, d.first + row, n.Kp);
    }
  }
}

/// kcol + kend: starts as dKb, scaled back from the chunk's end tile by tile while later tiles add
/// their part.
template <class A>
void kda_column_gradients(const KdaSizes& n,
                          KdaChunkData<A>& d,
                          KdaChunkGradients<A>& gr) noexcept {
  for (std::int64_t t = d.tiles() - 1; t >= 0; --t) {
    const std::int64_t begin = t * kKdaTile, end = begin + kKdaTile, at = begin * n.ldk;
    for (std::int64_t r = begin; r < end; ++r)
      multiply_row(gr.kcol + r * n.ldk, gr.kcol + r * n.ldk, d.rest + r * n.ldk, n.Kp);
    for (std::int64_t r = 0; r < begin; ++r)
      multiply_row(gr.kcol + r * n.ldk, gr.kcol + r * n.ldk, d.tile + t * n.ldk, n.Kp);
    if (t > 0) {
      tile_gemm<Update::add>(begin,
                             n.Kp,
                             kKdaTile,
                             Operand<A>{gr.dp + begin * n.C, 1, n.C},
                             d.q_row + at,
                             n.ldk,
                             gr.kcol,
                             n.ldk);
      tile_gemm<Update::add>(begin,
                             n.Kp,
                             kKdaTile,
                             Operand<A>{gr.da + begin * n.C, 1, n.C},
                             d.k_row + at,
                             n.ldk,
                             gr.kcol,
                             n.ldk);
    }
    kda_tile_backward<A>({d.q + at, d.k + at, d.alpha + at, n.ldk, n.Kp},
                         gr.da + begin * n.C + begin,
                         gr.dp + begin * n.C + begin,
                         n.C,
                         gr.dq + at,
                         gr.krow + at,
                         gr.kcol + at);
  }
}

/// dS = diag(e^G_C) dS' + Qh^T dO - Kh^T dR.
template <class A>
void kda_state_gradient(const KdaSizes& n, KdaChunkData<A>& d, KdaChunkGradients<A>& gr) noexcept {
  kda_decay_state(n, d.total, gr.ds);
  tile_gemm<Update::add>(
      n.Kp, n.Vp, d.rows, Operand<A>{d.q_hat, 1, n.ldk}, gr.d_o, n.ldv, gr.ds, n.ldv);
  tile_gemm<Update::subtract>(
      n.Kp, n.Vp, d.rows, Operand<A>{d.k_hat, 1, n.ldk}, gr.du, n.ldv, gr.ds, n.ldv);
}

/// dg by a suffix sum of q dq + k (krow - kcol), the whole chunk's decay at its end; then dk = krow
/// + kcol, in krow. The pair of a token with itself has no decay, so it joins dq and dk after the
/// sum: under a strong decay it would drown the rest.
template <class A>
void kda_decay_gradient(const KdaSizes& n,
                        KdaChunkData<A>& d,
                        KdaChunkGradients<A>& gr,
                        const A* g,
                        A* dg,
                        std::int64_t stride) noexcept {
  A* running = gr.d_total;
  for (std::int64_t r = d.tokens - 1; r >= 0; --r) {
    const std::int64_t at = r * n.ldk;
    const A own = gr.dp[r * n.C + r];
#pragma omp simd
    for (std::int64_t c = 0; c < n.K; ++c) {
      const A q = d.q[at + c], k = d.k[at + c], row = gr.krow[at + c], column = gr.kcol[at + c];
      running[c] += q * gr.dq[at + c] + k * (row - column);
      dg[r * stride + c] = g[r * stride + c] < kKdaGradientFloor<A> ? A(0) : running[c];
      gr.dq[at + c] += own * k;
      gr.krow[at + c] = row + column + own * q;
    }
  }
}

/// All gradients of the chunk but their storing: needs data loaded with decays, d_o, ds = dS';
/// leaves dq, krow (= dk), du
/// (= dv), dbeta and ds for the chunk before. dg is written.
template <class A>
void kda_chunk_backward(const KdaSizes& n,
                        KdaChunkData<A>& d,
                        const KdaRecord<A>& rec,
                        KdaChunkGradients<A>& gr,
                        const A* g,
                        A* dg,
                        std::int64_t stride) noexcept {
  kda_scale_by_beta(n, d, rec.w, d.u, 0, d.rows);
  kda_keys_to_end(n, d, gr.keys);
  kda_correction_gradients(n, d, rec, gr);
  kda_operand_gradients(n, d, rec, gr);
  kda_row_gradients(n, d, gr);
  kda_column_gradients(n, d, gr);
  kda_state_gradient(n, d, gr);
  kda_decay_gradient(n, d, gr, g, dg, stride);
}

}  // namespace moesaic::cpu
