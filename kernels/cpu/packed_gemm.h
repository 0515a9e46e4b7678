#pragma once
// Products whose right operand was packed beforehand. Every element of the result is, per block of kGemmDepthBlock values
// of k, one sum in ascending order of k, the blocks added in order: its bits depend on its row, its column and k alone,
// not on the number of rows, so few rows cost no more than they should. Chained products have no blocks.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/base/dtype.h"
#include "kernels/cpu/tile_gemm.h"

namespace moesaic::cpu {

/// Values of k per partial sum; part of the bits.
constexpr std::int64_t kGemmDepthBlock = 256;
/// Rows per unit of work. Not part of the bits.
constexpr std::int64_t kGemmRowBlock = 96;
/// Rows and columns that the innermost kernel keeps in registers.
constexpr std::int64_t kPackRows = 6;
template <class A>
constexpr std::int64_t kPackColumns = 2 * VectorOf<A>::kLanes;

/// to[r, c] = from[r, c] in another type, rows x cols, leading dimensions in elements.
template <class To, class From>
inline void convert_block(const From* from,
                          std::int64_t from_ld,
                          To* to,
                          std::int64_t to_ld,
                          std::int64_t rows,
                          std::int64_t cols) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const From* f = from + r * from_ld;
    To* t = to + r * to_ld;
#pragma omp simd
    for (std::int64_t c = 0; c < cols; ++c)
      t[c] = To(f[c]);
  }
}

/// Elements of a packed right operand [k, n].
template <class A>
constexpr std::int64_t packed_size(std::int64_t k, std::int64_t n) {
  return (n + kPackColumns<A> - 1) / kPackColumns<A> * kPackColumns<A> * k;
}

/// Packs columns [begin, end) of b [k, n] (or [n, k] when transposed), begin a multiple of kPackColumns: panels of
/// kPackColumns columns one after the other, each [k, kPackColumns]; columns beyond `end` are zero.
template <class A, class T>
void pack_columns(const T* b,
                  std::int64_t ldb,
                  bool transposed,
                  std::int64_t k,
                  std::int64_t begin,
                  std::int64_t end,
                  A* packed);

/// c (+)= alpha op(a) b with b packed. T: type of a; C: type of c, T or its acc_t.
template <class T, class C>
struct PackedProduct {
  using A = acc_t<T>;
  const T* a = nullptr;  ///< [m, k], or [k, m] when transpose_a
  std::int64_t lda = 0;
  bool transpose_a = false;
  const A* b = nullptr;  ///< packed [k, n]
  std::int64_t b_rows =
      0;  ///< k of the packing; larger than k when b points to its rows from some row on
  C* c = nullptr;
  std::int64_t ldc = 0;
  std::int64_t n = 0, k = 0;
  A alpha = 1;
  bool accumulate = false;
  /// With accumulate, alpha 1 and C = A: each sum over k begins with what is in c, without blocks. So products one after the
  /// other, each over some of the k, give the bits of one over all of them, wherever k is cut.
  bool chained = false;

  /// Elements of A that rows() needs as scratch for up to `max_n` columns and depths up to `max_k`.
  static constexpr std::int64_t scratch_size(std::int64_t max_n,
                                             std::int64_t max_k,
                                             bool transpose_a) {
    const bool left = transpose_a || !std::is_same_v<T, A>;
    return 1 + (left ? kGemmRowBlock * std::min(max_k, kGemmDepthBlock) : 0) +
           (std::is_same_v<C, A> ? 0 : kGemmRowBlock * max_n);
  }
  /// Rows [begin, end) of c, at most kGemmRowBlock.
  void rows(std::int64_t begin, std::int64_t end, A* scratch) const;

 private:
  void into(std::int64_t begin, std::int64_t rows, A* left, A* out, std::int64_t ld) const;
};

extern template struct PackedProduct<double, double>;
extern template struct PackedProduct<float, float>;
extern template struct PackedProduct<bf16, bf16>;
extern template struct PackedProduct<bf16, float>;

}  // namespace moesaic::cpu
