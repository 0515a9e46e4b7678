#pragma once
// The iteration of Muon on one matrix [m, n], m <= n. Small matrices are multiplied by our own kernel, one thread per
// matrix; large ones by the BLAS library, their rows shared by the threads in tiles of a fixed size.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <utility>

#include "kernels/cpu/blas.h"
#include "kernels/cpu/packed_gemm.h"
#include "kernels/cpu/thread_pool.h"

namespace moesaic::cpu {

/// Calls body(begin, end) for tiles [0, tile), [tile, 2 tile) … of [0, n), on one thread or on all.
struct MatrixLoop {
  using Body = std::function<void(std::int64_t, std::int64_t)>;
  std::int64_t tile = 0;       ///< part of the bits
  ThreadPool* pool = nullptr;  ///< null: in the caller
  void operator()(std::int64_t n, const Body& body) const {
    if (pool != nullptr) return pool->parallel_for(n, tile, body);
    for (std::int64_t i = 0; i < n; i += tile)
      body(i, std::min(n, i + tile));
  }
};

/// Whether threads share the rows of a matrix with m rows, and the library multiplies it.
constexpr bool is_large_matrix(std::int64_t m) {
  return m >= 256;
}
inline MatrixLoop small_matrix_loop() {
  return {48, nullptr};
}
inline MatrixLoop large_matrix_loop(ThreadPool& pool) {
  return {128, &pool};
}

/// x <- the iteration applied `iterations` times to x / |x|. A: float | double.
template <class A>
struct NewtonSchulzIteration {
  const MatrixLoop& loop;
  std::int64_t m, n;
  A* x;          ///< [m, n]
  A* other;      ///< [m, n]
  A* y;          ///< [m, m]
  A* z;          ///< [m, m]
  A* packed;     ///< packed_elements(m, n)
  double* sums;  ///< one per tile of rows

  static std::int64_t packed_elements(std::int64_t m, std::int64_t n) {
    if (is_large_matrix(m)) return 0;
    return std::max(packed_size<A>(n, m),   // x^T
                    packed_size<A>(m, n));  // x
  }

  /// Returns where the result is: x or other.
  A* run(int iterations) {
    normalise();
    for (int i = 0; i < iterations; ++i) {
      gram();
      polynomial();
      advance();
    }
    return x;
  }

 private:
  static constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;
  static constexpr double kNormFloor = 1e-7;
  static constexpr std::int64_t kStrip = 12;  // rows of a small symmetric product that share an end

  bool large() const { return is_large_matrix(m); }

  void normalise() const {
    loop(m, [&](std::int64_t begin, std::int64_t end) {
      const A* v = x;
      const std::int64_t from = begin * n, to = end * n;
      double sum = 0;
#pragma omp simd reduction(+ : sum)
      for (std::int64_t i = from; i < to; ++i)
        sum += static_cast<double>(v[i]) * static_cast<double>(v[i]);
      sums[begin / loop.tile] = sum;
    });
    double total = 0;
    for (std::int64_t i = 0; i * loop.tile < m; ++i)
      total += sums[i];
    const auto scale = static_cast<A>(1.0 / (std::sqrt(total) + kNormFloor));
    loop(m, [&](std::int64_t begin, std::int64_t end) {
#pragma omp simd
      for (std::int64_t i = begin * n; i < end * n; ++i)
        x[i] *= scale;
    });
  }

  void gram() const {  // y = x x^T
    pack(x, true, n, m);
    symmetric({x, x, y, n, m, true, A(1), false});
  }

  void polynomial() const {  // z = b y + c y^2
    scale_rows(A(kB), y, z, m);
    pack(y, false, m, m);
    symmetric({y, y, z, m, m, false, A(kC), true});
  }

  void advance() {  // x = a x + z x
    scale_rows(A(kA), x, other, n);
    pack(x, false, m, n);
    const Product p{z, x, other, m, n, false, A(1), true};
    loop(m, [&](std::int64_t begin, std::int64_t end) { rows(p, begin, end, n); });
    std::swap(x, other);
  }

  /// c [m, columns] (+)= alpha left [m, depth] right, which is [depth, columns], or its transpose.
  struct Product {
    const A* left;
    const A* right;
    A* c;
    std::int64_t depth, columns;
    bool transposed;
    A alpha;
    bool accumulate;
  };

  /// Rows [begin, end) of the first `columns` columns of the product; `right` was packed if the matrix is small.
  void rows(const Product& p, std::int64_t begin, std::int64_t end, std::int64_t columns) const {
    if (large()) {
      return blas_gemm<A>(false,
                          p.transposed,
                          end - begin,
                          columns,
                          p.depth,
                          p.alpha,
                          p.left + begin * p.depth,
                          p.depth,
                          p.right,
                          p.transposed ? p.depth : p.columns,
                          p.accumulate ? A(1) : A(0),
                          p.c + begin * p.columns,
                          p.columns);
    }
    PackedProduct<A, A> own;
    own.a = p.left;
    own.lda = own.k = own.b_rows = p.depth;
    own.b = packed;
    own.c = p.c;
    own.ldc = p.columns;
    own.n = columns;
    own.alpha = p.alpha;
    own.accumulate = p.accumulate;
    own.rows(begin, end, nullptr);
  }

  void pack(const A* right, bool transposed, std::int64_t depth, std::int64_t columns) const {
    if (large()) return;
    loop(columns, [&](std::int64_t begin, std::int64_t end) {
      pack_columns<A, A>(
          right, transposed ? depth : columns, transposed, depth, begin, end, packed);
    });
  }

  /// Rows of a symmetric result up to the diagonal, strip by strip, then the rest by symmetry. A small strip's columns
  /// are rounded up to what the kernel computes anyway.
  void symmetric(const Product& p) const {
    const std::int64_t strip = large() ? loop.tile : kStrip, unit = large() ? 1 : kPackColumns<A>;
    const auto strip_end = [&](std::int64_t row) {
      return std::min(m, row / strip * strip + strip);
    };
    loop(m, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; row += strip) {
        const std::int64_t columns = std::min(m, (strip_end(row) + unit - 1) / unit * unit);
        rows(p, row, std::min(end, row + strip), columns);
      }
    });
    loop(m, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        for (std::int64_t j = strip_end(i); j < m; ++j)
          p.c[i * m + j] = p.c[j * m + i];
      }
    });
  }

  void scale_rows(A factor, const A* from, A* to, std::int64_t columns) const {
    loop(m, [&](std::int64_t begin, std::int64_t end) {
#pragma omp simd
      for (std::int64_t i = begin * columns; i < end * columns; ++i)
        to[i] = factor * from[i];
    });
  }
};

}  // namespace moesaic::cpu
