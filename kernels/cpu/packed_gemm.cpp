#include "kernels/cpu/packed_gemm.h"

#include <array>

namespace moesaic::cpu {
namespace {

/// Where the kernel finds the left operand: element (i, k) at data[i * row + k * column].
template <class A>
struct Left {
  const A* data;
  std::int64_t row, column;
};

/// What becomes of the sums: c = alpha sum, or c += alpha sum, for `columns` columns; chained: they begin with c.
template <class A>
struct Result {
  A* c;
  std::int64_t ld;
  std::int64_t columns;
  A alpha;
  bool add, chained;
};

// Where a row of c is read and written a vector at a time: in place, or through `line` when fewer columns are left.
template <class A, int Vectors>
inline void load_row(const Result<A>& r, const A* c, typename VectorOf<A>::type* sum) noexcept {
  constexpr std::int64_t kLanes = VectorOf<A>::kLanes;
  A line[Vectors * kLanes] = {};
  if (r.columns < Vectors * kLanes) {
    std::copy_n(c, r.columns, line);
    c = line;
  }
  for (int j = 0; j < Vectors; ++j)
    sum[j] = load_vector(c + j * kLanes);
}

template <class A, int Vectors>
inline void store_row(const Result<A>& r, A* c, const typename VectorOf<A>::type* sum) noexcept {
  constexpr std::int64_t kLanes = VectorOf<A>::kLanes;
  for (int j = 0; j < Vectors; ++j) {
    const auto scaled = r.alpha * sum[j];
    store_vector(c + j * kLanes,
                 r.add && !r.chained ? load_vector(c + j * kLanes) + scaled : scaled);
  }
}

// kPackedLeft: the left operand is a panel of pack_left(), else it is read in place.
template <class A, int Rows, int Vectors, bool kPackedLeft>
void kernel(std::int64_t depth, const Left<A>& left, const A* b, const Result<A>& result) noexcept {
  using V = typename VectorOf<A>::type;
  constexpr std::int64_t kLanes = VectorOf<A>::kLanes;
  const A* a = left.data;
  const std::int64_t row = kPackedLeft ? 1 : left.row, column = kPackedLeft ? kPackRows : 1;
  V sum[Rows][Vectors] = {};
  if (result.chained) {
    for (int i = 0; i < Rows; ++i)
      load_row<A, Vectors>(result, result.c + i * result.ld, sum[i]);
  }
#pragma GCC unroll 4
  for (std::int64_t k = 0; k < depth; ++k) {
    V right[Vectors];
    for (int j = 0; j < Vectors; ++j)
      right[j] = load_vector(b + k * kPackColumns<A> + j * kLanes);
    for (int i = 0; i < Rows; ++i) {
      const V value = broadcast<A>(a[i * row + k * column]);
      for (int j = 0; j < Vectors; ++j)
        sum[i][j] = fused_multiply_add<A>(value, right[j], sum[i][j]);
    }
  }
  if (result.columns == Vectors * kLanes) {
    for (int i = 0; i < Rows; ++i)
      store_row<A, Vectors>(result, result.c + i * result.ld, sum[i]);
    return;
  }
  for (int i = 0; i < Rows; ++i) {
    A line[Vectors * kLanes] = {};
    A* c = result.c + i * result.ld;
    if (result.add) std::copy_n(c, result.columns, line);
    store_row<A, Vectors>(result, line, sum[i]);
    std::copy_n(line, result.columns, c);
  }
}

template <class A>
using Kernel = void (*)(std::int64_t, const Left<A>&, const A*, const Result<A>&) noexcept;

template <class A, int Vectors, bool kPackedLeft>
constexpr std::array<Kernel<A>, kPackRows> kKernels{kernel<A, 1, Vectors, kPackedLeft>,
                                                    kernel<A, 2, Vectors, kPackedLeft>,
                                                    kernel<A, 3, Vectors, kPackedLeft>,
                                                    kernel<A, 4, Vectors, kPackedLeft>,
                                                    kernel<A, 5, Vectors, kPackedLeft>,
                                                    kernel<A, 6, Vectors, kPackedLeft>};

template <class A>
Kernel<A> kernel_of(std::int64_t rows, std::int64_t columns, bool packed_left) {
  const auto r = static_cast<std::size_t>(rows - 1);
  if (columns <= VectorOf<A>::kLanes)
    return packed_left ? kKernels<A, 1, true>[r] : kKernels<A, 1, false>[r];
  return packed_left ? kKernels<A, 2, true>[r] : kKernels<A, 2, false>[r];
}

// Panels of kPackRows rows of a transposed left operand, each [depth, kPackRows].
template <class T, class A>
void pack_left(const T* a, std::int64_t lda, std::int64_t rows, std::int64_t depth, A* packed) {
  for (std::int64_t k = 0; k < depth; ++k) {
    const T* from = a + k * lda;
    for (std::int64_t i = 0; i < rows; i += kPackRows) {
      A* to = packed + i * depth + k * kPackRows;
      const std::int64_t count = std::min(kPackRows, rows - i);
      if (count == kPackRows) {
        for (std::int64_t r = 0; r < kPackRows; ++r)
          to[r] = A(from[i + r]);
      } else {
        for (std::int64_t r = 0; r < count; ++r)
          to[r] = A(from[i + r]);
      }
    }
  }
}

// to [8, 8] (rows kPackColumns apart) = from [8, 8]^T (rows `ld` apart), in registers.
void transpose_square(const float* from, std::int64_t ld, float* to) noexcept {
  using V = VectorOf<float>::type;
  V r[8], t[8];
  for (int i = 0; i < 8; ++i)
    r[i] = load_vector(from + i * ld);
  for (int i = 0; i < 8; i += 2) {
    t[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    t[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = __builtin_shufflevector(t[i + j], t[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      r[i + 2 * j + 1] =
          __builtin_shufflevector(t[i + j], t[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int i = 0; i < 4; ++i) {
    store_vector(to + i * kPackColumns<float>,
                 __builtin_shufflevector(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11));
    store_vector(to + (i + 4) * kPackColumns<float>,
                 __builtin_shufflevector(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15));
  }
}

// A panel's columns [0, count) from the rows of a transposed operand.
template <class A, class T>
void pack_transposed(const T* from, std::int64_t ld, std::int64_t count, std::int64_t k, A* panel) {
  std::int64_t whole = 0;  // columns of depth done by squares
  if constexpr (std::is_same_v<T, float>) {
    whole = count == kPackColumns<A> ? k / 8 * 8 : 0;
    for (std::int64_t p = 0; p < whole; p += 8) {
      transpose_square(from + p, ld, panel + p * kPackColumns<A>);
      transpose_square(from + 8 * ld + p, ld, panel + p * kPackColumns<A> + 8);
    }
  }
  constexpr std::int64_t kSquare = 16;  // keeps both sides in the first-level cache
  for (std::int64_t p0 = whole; p0 < k; p0 += kSquare) {
    const std::int64_t p1 = std::min(k, p0 + kSquare);
    for (std::int64_t c = 0; c < count; ++c) {
      for (std::int64_t p = p0; p < p1; ++p)
        panel[p * kPackColumns<A> + c] = A(from[c * ld + p]);
    }
  }
}

}  // namespace

template <class A, class T>
void pack_columns(const T* b,
                  std::int64_t ldb,
                  bool transposed,
                  std::int64_t k,
                  std::int64_t begin,
                  std::int64_t end,
                  A* packed) {
  constexpr std::int64_t kColumns = kPackColumns<A>;
  for (std::int64_t j = begin; j < end; j += kColumns) {
    const std::int64_t count = std::min(kColumns, end - j);
    A* panel = packed + j * k;
    if (count < kColumns) std::fill_n(panel, k * kColumns, A(0));
    if (!transposed) {
      for (std::int64_t p = 0; p < k; ++p) {
        const T* from = b + p * ldb + j;
        A* to = panel + p * kColumns;
        if (count == kColumns) {
#pragma omp simd
          for (std::int64_t c = 0; c < kColumns; ++c)
            to[c] = A(from[c]);
        } else {
          for (std::int64_t c = 0; c < count; ++c)
            to[c] = A(from[c]);
        }
      }
      continue;
    }
    pack_transposed<A, T>(b + j * ldb, ldb, count, k, panel);
  }
}

template void pack_columns<double, double>(
    const double*, std::int64_t, bool, std::int64_t, std::int64_t, std::int64_t, double*);
template void pack_columns<float, float>(
    const float*, std::int64_t, bool, std::int64_t, std::int64_t, std::int64_t, float*);
template void pack_columns<float, bf16>(
    const bf16*, std::int64_t, bool, std::int64_t, std::int64_t, std::int64_t, float*);

template <class T, class C>
void PackedProduct<T, C>::into(
    std::int64_t begin, std::int64_t rows, A* left, A* out, std::int64_t ld) const {
  for (std::int64_t p = 0; p < k; p += kGemmDepthBlock) {
    const std::int64_t depth = std::min(kGemmDepthBlock, k - p);
    Left<A> operand{left, depth, 1};
    if (transpose_a) {
      pack_left(a + p * lda + begin, lda, rows, depth, left);
    } else if constexpr (std::is_same_v<T, A>) {
      operand = {a + begin * lda + p, lda, 1};
    } else {
      convert_block(a + begin * lda + p, lda, left, depth, rows, depth);
    }
    for (std::int64_t j = 0; j < n; j += kPackColumns<A>) {
      const A* panel = b + j * b_rows + p * kPackColumns<A>;
      const std::int64_t columns = std::min(kPackColumns<A>, n - j);
      for (std::int64_t i = 0; i < rows; i += kPackRows) {
        const std::int64_t count = std::min(kPackRows, rows - i);
        const Left<A> at{operand.data + i * operand.row, operand.row, operand.column};
        kernel_of<A>(count, columns, transpose_a)(depth,
                                                  at,
                                                  panel,
                                                  {out + i * ld + j,
                                                   ld,
                                                   columns,
                                                   alpha,
                                                   accumulate || p > 0,
                                                   chained && (accumulate || p > 0)});
      }
    }
  }
}

template <class T, class C>
void PackedProduct<T, C>::rows(std::int64_t begin, std::int64_t end, A* scratch) const {
  C* target = c + begin * ldc;
  if constexpr (std::is_same_v<C, A>) {
    into(begin, end - begin, scratch, target, ldc);
  } else {
    A* tile = scratch;
    A* left = scratch + kGemmRowBlock * n;
    if (accumulate) convert_block(target, ldc, tile, n, end - begin, n);
    into(begin, end - begin, left, tile, n);
    convert_block(tile, n, target, ldc, end - begin, n);
  }
}

template struct PackedProduct<double, double>;
template struct PackedProduct<float, float>;
template struct PackedProduct<bf16, bf16>;
template struct PackedProduct<bf16, float>;

}  // namespace moesaic::cpu
