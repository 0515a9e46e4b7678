#pragma once
// The diagonal tiles of the KDA chunk form: 16 tokens against each other, pair by pair. The weight
// of a pair, w_ri = alpha_{i+1} ... alpha_r, is a product of numbers <= 1: nothing overflows,
// whatever the gate, and nothing cancels.
#include <algorithm>

#include "kernels/cpu/tile_gemm.h"

namespace moesaic::cpu {

constexpr std::int64_t kKdaTile = 16;

/// Sums of the lanes of a and of b, in a fixed order.
inline void sums_of_lanes(VectorOf<float>::type a,
                          VectorOf<float>::type b,
                          float& sum_a,
                          float& sum_b) noexcept {
  const auto low = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11),
             high = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  const auto four = low + high;
  const auto two = four + __builtin_shufflevector(four, four, 2, 3, 0, 1, 6, 7, 4, 5);
  sum_a = two[0] + two[1];
  sum_b = two[4] + two[5];
}
inline void sums_of_lanes(VectorOf<double>::type a,
                          VectorOf<double>::type b,
                          double& sum_a,
                          double& sum_b) noexcept {
  const auto two =
      __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
  sum_a = two[0] + two[1];
  sum_b = two[2] + two[3];
}

/// Rows of a tile, `ld` apart and `width` (a multiple of 8) wide: queries, keys and token decays
/// alpha = e^g.
template <class A>
struct KdaTileRows {
  const A* q;
  const A* k;
  const A* alpha;
  std::int64_t ld;
  std::int64_t width;
};

/// a_ri = sum_c k_rc k_ic w_ri,c for i < r and p_ri = sum_c q_rc k_ic w_ri,c for i <= r; zero
/// elsewhere. `decayed` holds kKdaTile rows: k_i w_ri, carried from row r to row r + 1.
template <class A>
void kda_tile_forward(
    const KdaTileRows<A>& in, A* decayed, A* a, A* p, std::int64_t ld_out) noexcept {
  using V = typename VectorOf<A>::type;
  constexpr std::int64_t kLanes = VectorOf<A>::kLanes;
  for (std::int64_t r = 0; r < kKdaTile; ++r) {
    const A* q = in.q + r * in.ld;
    const A* k = in.k + r * in.ld;
    const A* alpha = in.alpha + r * in.ld;
    for (std::int64_t i = 0; i < r; ++i) {
      A* kw = decayed + i * in.ld;
      V sum_a = {}, sum_p = {};
      for (std::int64_t c = 0; c < in.width; c += kLanes) {
        const V w = load_vector(kw + c) * load_vector(alpha + c);
        store_vector(kw + c, w);
        sum_a += w * load_vector(k + c);
        sum_p += w * load_vector(q + c);
      }
      sums_of_lanes(sum_a, sum_p, a[r * ld_out + i], p[r * ld_out + i]);
    }
    V sum_p = {};
    for (std::int64_t c = 0; c < in.width; c += kLanes)
      sum_p += load_vector(k + c) * load_vector(q + c);
    sums_of_lanes(V{}, sum_p, a[r * ld_out + r], p[r * ld_out + r]);
    std::copy_n(k, in.width, decayed + r * in.ld);
    for (std::int64_t i = r + 1; i < kKdaTile; ++i)
      a[r * ld_out + i] = p[r * ld_out + i] = A(0);
  }
}

/// Adds the tile's own part, without the pairs i = r, of dq_r = sum_{i<r} dp_ri k_i w_ri, krow_r =
/// sum_{i<r} da_ri k_i w_ri and kcol_i = sum_{r>i} (dp_ri q_r + da_ri k_r) w_ri. Sums over tokens
/// by Horner's rule in the decays.
template <class A>
void kda_tile_backward(const KdaTileRows<A>& in,
                       const A* da,
                       const A* dp,
                       std::int64_t ld_pairs,
                       A* dq,
                       A* krow,
                       A* kcol) noexcept {
  using V = typename VectorOf<A>::type;
  constexpr std::int64_t kLanes = VectorOf<A>::kLanes;
  for (std::int64_t c = 0; c < in.width; c += kLanes) {
    for (std::int64_t r = 0; r < kKdaTile; ++r) {
      V sum_q = {}, sum_k = {};
      for (std::int64_t i = 0; i < r; ++i) {
        const V alpha = load_vector(in.alpha + i * in.ld + c),
                k = load_vector(in.k + i * in.ld + c);
        sum_q = sum_q * alpha + dp[r * ld_pairs + i] * k;
        sum_k = sum_k * alpha + da[r * ld_pairs + i] * k;
      }
      const std::int64_t at = r * in.ld + c;
      const V alpha = load_vector(in.alpha + at);
      store_vector(dq + at, load_vector(dq + at) + sum_q * alpha);
      store_vector(krow + at, load_vector(krow + at) + sum_k * alpha);
    }
    for (std::int64_t i = 0; i < kKdaTile; ++i) {
      V sum = {};
      for (std::int64_t r = kKdaTile - 1; r > i; --r) {
        const std::int64_t at = r * in.ld + c;
        sum += dp[r * ld_pairs + i] * load_vector(in.q + at) +
               da[r * ld_pairs + i] * load_vector(in.k + at);
        sum *= load_vector(in.alpha + at);
      }
      const std::int64_t at = i * in.ld + c;
      store_vector(kcol + at, load_vector(kcol + at) + sum);
    }
  }
}

/// inverse [16, 16] of I + diag(row_scale) a diag(column_scale), a strictly lower, by forward
/// substitution. A scale that is null counts as ones.
template <class A>
void kda_tile_inverse(
    const A* a, std::int64_t ld, const A* row_scale, const A* column_scale, A* inverse) noexcept {
  for (std::int64_t r = 0; r < kKdaTile; ++r) {
    A row[kKdaTile] = {};
    for (std::int64_t i = 0; i < r; ++i) {
      const A factor = a[r * ld + i] * (column_scale != nullptr ? column_scale[i] : A(1));
      for (std::int64_t j = 0; j < kKdaTile; ++j)
        row[j] -= factor * inverse[i * kKdaTile + j];
    }
    for (std::int64_t j = 0; j < kKdaTile; ++j) {
      inverse[r * kKdaTile + j] =
          row[j] * (row_scale != nullptr ? row_scale[r] : A(1)) + (j == r ? A(1) : A(0));
    }
  }
}

}  // namespace moesaic::cpu
