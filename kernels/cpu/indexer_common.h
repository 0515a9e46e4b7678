#pragma once
// Index scores by tiles, shared by selection and loss so that both see the same bits.
#include <cmath>

#include "kernels/cpu/tiles.h"

namespace moesaic::cpu {

struct IndexerInputs {
  ConstTensorView qi, ki, w;
  std::int64_t queries() const { return qi.dim(0); }
  std::int64_t heads() const { return qi.dim(1); }
  std::int64_t dim() const { return qi.dim(2); }
  std::int64_t keys() const { return ki.dim(0); }
  std::int64_t width() const { return heads() * dim(); }
  double factor() const {
    return 1.0 / std::sqrt(static_cast<double>(heads()) * static_cast<double>(dim()));
  }
  Rows query() const { return {qi, 0, width(), width()}; }
  Rows key() const { return {ki, 0, dim(), dim()}; }
  Rows weight() const { return {w, 0, heads(), heads()}; }
};

/// sums[i, c] = sum_j w[i, j] relu(<q_j(i), k(c)>) for a tile of kTile x kTile pairs.
///   q [kTile, heads * dim], w [kTile, heads] (times the factor), key_t [dim, kTile]
///   dots [kTile, kTile], scratch; with keep [heads, kTile, kTile]: <q_j(i), k(c)> of every head
template <class A>
void score_tile(A* sums,
                std::int64_t ld,
                const A* q,
                const A* w,
                const A* key_t,
                std::int64_t heads,
                std::int64_t dim,
                A* dots,
                bool keep = false) {
  for (std::int64_t i = 0; i < kTile; ++i)
    std::fill_n(sums + i * ld, kTile, A(0));
  for (std::int64_t j = 0; j < heads; ++j, dots += keep ? kTile * kTile : 0) {
    blas_gemm(false,
              false,
              kTile,
              kTile,
              dim,
              A(1),
              q + j * dim,
              heads * dim,
              key_t,
              kTile,
              A(0),
              dots,
              kTile);
    for (std::int64_t i = 0; i < kTile; ++i) {
      const A weight = w[i * heads + j];
      A* sum = sums + i * ld;
      const A* dot = dots + i * kTile;
#pragma omp simd
      for (std::int64_t c = 0; c < kTile; ++c)
        sum[c] += weight * (dot[c] < A(0) ? A(0) : dot[c]);  // keeps NaN
    }
  }
}

/// The scores of one query: sums[c] = sum_j w[j] relu(dots[j, c]), c < n.
template <class A>
void score_row(
    A* sums, const A* w, const A* dots, std::int64_t ld, std::int64_t heads, std::int64_t n) {
  std::fill_n(sums, n, A(0));
  for (std::int64_t j = 0; j < heads; ++j) {
    const A weight = w[j];
    const A* dot = dots + j * ld;
#pragma omp simd
    for (std::int64_t c = 0; c < n; ++c)
      sums[c] += weight * (dot[c] < A(0) ? A(0) : dot[c]);
  }
}

/// log x of a positive normal float, branch-free; relative error below 2e-7 away from 1, absolute
/// below 1e-7 near 1.
inline double log_positive(double x) noexcept {
  return std::log(x);
}
inline float log_positive(float x) noexcept {
  // x = 2^e m with m in [sqrt(1/2), sqrt 2); log m = 2 artanh z, z = (m - 1) / (m + 1), |z| <
  // 0.172.
  const auto bits = std::bit_cast<std::int32_t>(x);
  const std::int32_t e = (bits - 0x3f3504f3) >> 23;
  const float m = std::bit_cast<float>(bits - e * (1 << 23));
  const float z = (m - 1.0F) / (m + 1.0F), z2 = z * z;
  const float series =
      2.0F + z2 * (0.66666667F + z2 * (0.4F + z2 * (0.28571429F + z2 * 0.22222222F)));
  return z * series + static_cast<float>(e) * 0.69314718F;
}

/// One query's loss over n keys. target[c] >= 0 (0 = hidden), index[c] (-inf = hidden).
/// Returns KL(target / sum || softmax(index)) and replaces index by factor * (softmax(index) -
/// target / sum).
template <class A>
A kl_row(const A* target, A* index, std::int64_t n, A factor) {
  A total = 0, exp_total = 0;
#pragma omp simd reduction(+ : total)
  for (std::int64_t c = 0; c < n; ++c)
    total += target[c];
  const A maximum = largest(index, n);
  if (!(total > A(0)) || maximum == -std::numeric_limits<A>::infinity()) {  // no keys
    std::fill_n(index, n, A(0));
    return total != total ? total : A(0);
  }
#pragma omp simd reduction(+ : exp_total)
  for (std::int64_t c = 0; c < n; ++c)
    exp_total += cpu::exp(index[c] - maximum);
  const A log_sum = maximum + std::log(exp_total), inverse = A(1) / total;
  A kl = 0;
#pragma omp simd reduction(+ : kl)
  for (std::int64_t c = 0; c < n; ++c) {
    const A p = target[c] * inverse;
    const A log_q = index[c] - log_sum;
    const A term = p * (log_positive(p) - log_q);
    kl += p > A(0) ? term : A(0);
    index[c] = factor * (cpu::exp(log_q) - p);
  }
  return kl;
}

}  // namespace moesaic::cpu
