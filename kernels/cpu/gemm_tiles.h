#pragma once
// Row tiles of a product with operands of any type, shared by the dense and the grouped products.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/base/dtype.h"
#include "kernels/cpu/gemm.h"

namespace moesaic::cpu {

/// to[r, c] = from[r, c] in another type, rows x cols, leading dimensions in elements.
template <class To, class From>
inline void convert_block(const From* from, std::int64_t from_ld, To* to, std::int64_t to_ld, std::int64_t rows,
                          std::int64_t cols) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const From* f = from + r * from_ld;
    To* t = to + r * to_ld;
#pragma omp simd
    for (std::int64_t c = 0; c < cols; ++c) t[c] = To(f[c]);
  }
}

/// One product c (+)= alpha op(a) b' of elements T into elements C, where b' is already in the accumulation type: either
/// b itself, or a converted block of it.
template <class T, class C>
struct TileProduct {
  using A = acc_t<T>;
  const T* a = nullptr;
  std::int64_t lda = 0;
  bool transpose_a = false;
  const A* b = nullptr;
  std::int64_t ldb = 0;
  bool transpose_b = false;
  C* c = nullptr;
  std::int64_t ldc = 0;
  std::int64_t m = 0, n = 0, k = 0;
  A alpha = 1;
  bool accumulate = false;

  /// Elements of A that row_tile() needs as `scratch` for products of this n and k.
  static std::int64_t scratch_size(std::int64_t n, std::int64_t k, bool transpose_a) {
    return kGemmRowTile * (n + (transpose_a ? std::min(k, kGemmDepthBlock) : k));
  }

  /// Rows [row, row + kGemmRowTile) of c, or what there is of them; always computed as a full tile.
  void row_tile(std::int64_t row, A* scratch) const {
    const std::int64_t rows = std::min(kGemmRowTile, m - row);
    const bool whole = rows == kGemmRowTile;
    C* out = c + row * ldc;
    A* tile_c = scratch;
    A* tile_a = scratch + kGemmRowTile * n;
    std::int64_t tile_ldc = n;
    if constexpr (std::is_same_v<C, A>) {
      if (whole) {
        tile_c = out;
        tile_ldc = ldc;
      }
    }
    const bool c_in_place = tile_c != scratch;
    if (!c_in_place && accumulate) {
      convert_block(out, ldc, tile_c, n, rows, n);
      std::fill(tile_c + rows * n, tile_c + kGemmRowTile * n, A(0));
    }
    const std::int64_t step = transpose_a ? kGemmDepthBlock : k;
    for (std::int64_t p = 0; p < k; p += step) {
      const std::int64_t depth = std::min(step, k - p);
      std::int64_t tile_lda = 0;
      const A* left = left_operand(row, rows, p, depth, tile_a, tile_lda);
      const A* right = transpose_b ? b + p : b + p * ldb;
      gemm_tile<A>(transpose_a, transpose_b, kGemmRowTile, n, depth, alpha, left, tile_lda, right, ldb,
                   p == 0 && !accumulate ? A(0) : A(1), tile_c, tile_ldc);
    }
    if (!c_in_place) convert_block(tile_c, n, out, ldc, rows, n);
  }

 private:
  // The tile's part of op(a) for depth [p, p + depth): in place when nothing has to be converted or padded.
  const A* left_operand(std::int64_t row, std::int64_t rows, std::int64_t p, std::int64_t depth, A* tile,
                        std::int64_t& ld) const {
    const T* from = transpose_a ? a + p * lda + row : a + row * lda + p;
    if constexpr (std::is_same_v<T, A>) {
      if (rows == kGemmRowTile) {
        ld = lda;
        return from;
      }
    }
    if (transpose_a) {
      ld = kGemmRowTile;
      convert_block(from, lda, tile, ld, depth, rows);
      for (std::int64_t r = 0; r < depth; ++r) std::fill(tile + r * ld + rows, tile + (r + 1) * ld, A(0));
    } else {
      ld = depth;
      convert_block(from, lda, tile, ld, rows, depth);
      std::fill(tile + rows * ld, tile + kGemmRowTile * ld, A(0));
    }
    return tile;
  }
};

}  // namespace moesaic::cpu
