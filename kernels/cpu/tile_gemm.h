#pragma once
// Small dense products of matrices that lie in the cache, for kernels that work on tiles. Rows of
// the result are a multiple of 4, columns a multiple of 8; the caller pads with zeros. Every
// element is one sum over k in ascending order, so its bits depend on nothing but its own row and
// column.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__FMA__) && defined(__AVX__)
#include <immintrin.h>
#endif

namespace moesaic::cpu {

template <class A>
struct VectorOf {
  static constexpr std::int64_t kLanes = 32 / sizeof(A);
  typedef A type __attribute__((vector_size(32)));
};

template <class A>
inline typename VectorOf<A>::type load_vector(const A* p) noexcept {
  typename VectorOf<A>::type v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class A>
inline void store_vector(A* p, typename VectorOf<A>::type v) noexcept {
  std::memcpy(p, &v, sizeof v);
}

/// a b + c, rounded once. Spelled out, because a compiler that contracts a * b + c in one instance of a kernel and not in
/// another (GCC 13 does, by the number of sums in flight) would give a row other bits next to other rows.
template <class A>
inline typename VectorOf<A>::type fused_multiply_add(typename VectorOf<A>::type a,
                                                     typename VectorOf<A>::type b,
                                                     typename VectorOf<A>::type c) noexcept {
#if defined(__FMA__) && defined(__AVX__)
  if constexpr (std::is_same_v<A, double>) {
    return _mm256_fmadd_pd(a, b, c);
  } else {
    return _mm256_fmadd_ps(a, b, c);
  }
#else
  typename VectorOf<A>::type r;
  for (std::int64_t i = 0; i < VectorOf<A>::kLanes; ++i)
    r[i] = std::fma(a[i], b[i], c[i]);
  return r;
#endif
}
/// All lanes equal to x.
template <class A>
inline typename VectorOf<A>::type broadcast(A x) noexcept {
  return x - typename VectorOf<A>::type{};
}

enum class Update { set, set_negative, add, subtract };

/// A matrix operand: element (i, k) at data[i * row + k * column]; a transposed operand swaps the
/// strides.
template <class A>
struct Operand {
  const A* data;
  std::int64_t row;
  std::int64_t column = 1;
};

template <class A, int Rows, int Vectors, Update kUpdate>
inline void tile_kernel(std::int64_t depth,
                        Operand<A> a,
                        const A* b,
                        std::int64_t ldb,
                        A* c,
                        std::int64_t ldc) noexcept {
  using V = typename VectorOf<A>::type;
  constexpr std::int64_t kLanes = VectorOf<A>::kLanes;
  V sum[Rows][Vectors] = {};
  for (std::int64_t k = 0; k < depth; ++k) {
    V right[Vectors];
    for (int j = 0; j < Vectors; ++j)
      right[j] = load_vector(b + k * ldb + j * kLanes);
    for (int i = 0; i < Rows; ++i) {
      const V left = broadcast<A>(a.data[i * a.row + k * a.column]);
      for (int j = 0; j < Vectors; ++j)
        sum[i][j] = fused_multiply_add<A>(left, right[j], sum[i][j]);
    }
  }
  for (int i = 0; i < Rows; ++i) {
    for (int j = 0; j < Vectors; ++j) {
      A* out = c + i * ldc + j * kLanes;
      if constexpr (kUpdate == Update::set) store_vector(out, sum[i][j]);
      if constexpr (kUpdate == Update::set_negative) store_vector(out, -sum[i][j]);
      if constexpr (kUpdate == Update::add) store_vector(out, load_vector(out) + sum[i][j]);
      if constexpr (kUpdate == Update::subtract) store_vector(out, load_vector(out) - sum[i][j]);
    }
  }
}

/// c [rows, columns] (=, = -, +=, -=) a [rows, depth] b [depth, columns].
template <Update kUpdate, class A>
void tile_gemm(std::int64_t rows,
               std::int64_t columns,
               std::int64_t depth,
               Operand<A> a,
               const A* b,
               std::int64_t ldb,
               A* c,
               std::int64_t ldc) noexcept {
  constexpr std::int64_t kWide = 2 * VectorOf<A>::kLanes;
  for (std::int64_t j = 0; j < columns; j += kWide) {
    const bool wide = j + kWide <= columns;
    for (std::int64_t i = 0; i < rows; i += 4) {
      const Operand<A> left{a.data + i * a.row, a.row, a.column};
      if (wide) {
        tile_kernel<A, 4, 2, kUpdate>(depth, left, b + j, ldb, c + i * ldc + j, ldc);
      } else {
        tile_kernel<A, 4, 1, kUpdate>(depth, left, b + j, ldb, c + i * ldc + j, ldc);
      }
    }
  }
}

/// out [columns, rows] = in [rows, columns]^T.
template <class A>
void transpose(std::int64_t rows,
               std::int64_t columns,
               const A* in,
               std::int64_t ld_in,
               A* out,
               std::int64_t ld_out) noexcept {
  constexpr std::int64_t kBlock = 8;
  for (std::int64_t i0 = 0; i0 < rows; i0 += kBlock) {
    for (std::int64_t j = 0; j < columns; ++j) {
      for (std::int64_t i = i0; i < i0 + kBlock && i < rows; ++i)
        out[j * ld_out + i] = in[i * ld_in + j];
    }
  }
}

}  // namespace moesaic::cpu
