#pragma once
// Pieces of the plain attention kernels: square tiles of kRows rows by kRows columns, 4 x 4 elements
// per thread, operands widened to the statistics type in shared memory.
#include "kernels/cuda/attention_common.cuh"

namespace moesaic::cuda {

template <class A>
struct PlainTile {
  static constexpr int kRows = sizeof(A) == 8 ? 32 : 64;
  static constexpr int kSide = kRows / 4;  // threads along an edge
  static constexpr int kThreads = kSide * kSide;
  static constexpr int kVector = 16 / sizeof(A);
  static constexpr int kDepth = 32;                   // channels of a product at a time
  static constexpr int kLd = kDepth + kVector;        // row strides that keep vectors aligned and
  static constexpr int kSquareLd = kRows + kVector;   // lanes in different banks
  static constexpr int kColumns = 512;                // channels of a result in one block
  static constexpr int kOperand = kRows * kSquareLd;  // >= kRows * kLd
  static_assert(kSquareLd >= kLd);
};

/// Rows of a tensor as one head sees them: up to two pieces side by side, as in [kn ; kr].
template <class T>
struct HeadRows {
  const T* left = nullptr;
  std::int64_t left_stride = 0;
  std::int64_t left_width = 0;
  const T* right = nullptr;
  std::int64_t right_stride = 0;
  __device__ T at(std::int64_t row, std::int64_t c) const {
    return c < left_width ? left[row * left_stride + c]
                          : right[row * right_stride + (c - left_width)];
  }
};

template <class T>
struct PlainInputs {
  AttentionSizes size;
  const T *q, *kvb, *kr;
  __device__ HeadRows<T> query(std::int64_t h) const {
    return {q + h * size.dqk(), size.heads * size.dqk(), size.dqk(), nullptr, 0};
  }
  __device__ HeadRows<T> key(std::int64_t h) const {
    return {kvb + h * size.dkv(), size.heads * size.dkv(), size.dn, kr, size.dr};
  }
  __device__ HeadRows<T> value(std::int64_t h) const {
    return {kvb + h * size.dkv() + size.dn, size.heads * size.dkv(), size.dv, nullptr, 0};
  }
};

/// to[r][c] = factor * rows(row + r, column + c) for kRows rows and Width columns, zero past `count`
/// rows or past `width`.
template <class A, int Width, int Ld, class T>
__device__ __forceinline__ void load_operand(A* to,
                                             const HeadRows<T>& rows,
                                             std::int64_t row,
                                             int count,
                                             std::int64_t column,
                                             std::int64_t width,
                                             A factor) {
  using Tile = PlainTile<A>;
  for (int i = threadIdx.x; i < Tile::kRows * Width; i += Tile::kThreads) {
    const int r = i / Width, c = i % Width;
    const bool inside = r < count && column + c < width;
    to[r * Ld + c] = inside ? factor * widen<A>(rows.at(row + r, column + c)) : A(0);
  }
}

/// Where a thread's 4 x 4 elements are: rows y + kSide i; columns x + kSide j of logits, 4 x + j of
/// results.
template <class A>
struct PlainThread {
  int x = static_cast<int>(threadIdx.x) % PlainTile<A>::kSide;
  int y = static_cast<int>(threadIdx.x) / PlainTile<A>::kSide;
  __device__ int row(int i) const { return y + PlainTile<A>::kSide * i; }
  __device__ int column(int j) const { return x + PlainTile<A>::kSide * j; }
};

/// acc[i][j] = <a row i, b row j> over `width` channels. `buffers` holds two operands.
template <class A, class T, class U>
__device__ __forceinline__ void dot_tile(A (&acc)[4][4],
                                         A* buffers,
                                         const HeadRows<T>& a,
                                         std::int64_t a_row,
                                         int a_count,
                                         A a_factor,
                                         const HeadRows<U>& b,
                                         std::int64_t b_row,
                                         int b_count,
                                         A b_factor,
                                         std::int64_t width) {
  using Tile = PlainTile<A>;
  constexpr int kV = Tile::kVector;
  A *left = buffers, *right = buffers + Tile::kOperand;
  const PlainThread<A> me;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      acc[i][j] = 0;
  for (std::int64_t c = 0; c < width; c += Tile::kDepth) {
    load_operand<A, Tile::kDepth, Tile::kLd>(left, a, a_row, a_count, c, width, a_factor);
    load_operand<A, Tile::kDepth, Tile::kLd>(right, b, b_row, b_count, c, width, b_factor);
    __syncthreads();
#pragma unroll 2
    for (int k = 0; k < Tile::kDepth; k += kV) {
      Vec<A, kV> l[4], r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        l[i] = load<kV>(left + me.row(i) * Tile::kLd + k);
        r[i] = load<kV>(right + me.column(i) * Tile::kLd + k);
      }
#pragma unroll
      for (int v = 0; v < kV; ++v)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            acc[i][j] += l[i].v[v] * r[j].v[v];
    }
    __syncthreads();
  }
}

/// sum[r][c] = shrink_i * sum[r][c] + sum_s weights[r][s] rows(row + s, c) for channels c of
/// [begin, end), kept at sum[r][c - begin]. `buffer` holds one operand; weights [kRows][kSquareLd].
template <class A, class T>
__device__ __forceinline__ void add_weighted_rows(A* sum,
                                                  int sum_ld,
                                                  const A (&shrink)[4],
                                                  const A* weights,
                                                  A* buffer,
                                                  const HeadRows<T>& rows,
                                                  std::int64_t row,
                                                  int count,
                                                  std::int64_t begin,
                                                  std::int64_t end,
                                                  A factor) {
  using Tile = PlainTile<A>;
  constexpr int kV = Tile::kVector;
  const PlainThread<A> me;
  for (std::int64_t c = begin; c < end; c += Tile::kRows) {
    load_operand<A, Tile::kRows, Tile::kSquareLd>(buffer, rows, row, count, c, end, factor);
    __syncthreads();
    A acc[4][4] = {};
    for (int s = 0; s < Tile::kRows; s += kV) {
      Vec<A, kV> w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        w[i] = load<kV>(weights + me.row(i) * Tile::kSquareLd + s);
#pragma unroll
      for (int v = 0; v < kV; ++v) {
        const auto x = load<4>(buffer + (s + v) * Tile::kSquareLd + 4 * me.x);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            acc[i][j] += w[i].v[v] * x.v[j];
      }
    }
    const int at = static_cast<int>(c - begin) + 4 * me.x;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (at + j < sum_ld) {
          A& to = sum[me.row(i) * sum_ld + at + j];
          to = to * shrink[i] + acc[i][j];
        }
    __syncthreads();
  }
}

template <class A>
__device__ __forceinline__ void store_square(A* to, const A (&acc)[4][4]) {
  const PlainThread<A> me;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      to[me.row(i) * PlainTile<A>::kSquareLd + me.column(j)] = acc[i][j];
}

/// Whether any of `rows` query rows from `row` on sees a key of the tile that begins at `s`. All
/// threads must call it.
template <class A>
__device__ __forceinline__ bool any_visible(
    const SelectionBits& bits, std::int64_t row, int rows, int last_position, int s) {
  using Tile = PlainTile<A>;
  if (bits.words == nullptr) return s <= last_position;
  constexpr int kWords = Tile::kRows / 32;
  bool any = false;
  for (int i = threadIdx.x; i < rows * kWords; i += Tile::kThreads)
    any |= bits.words[(row + i / kWords) * bits.per_row + s / 32 + i % kWords] != 0;
  return __syncthreads_or(any) != 0;
}

/// A block's share of a result's channels: as many as fit one block, the grid's z has the rest.
struct ColumnRange {
  std::int64_t begin, end;
  __device__ ColumnRange(std::int64_t width, std::int64_t per_block)
      : begin(blockIdx.z * per_block), end(min(width, begin + per_block)) {}
};

inline std::size_t plain_column_blocks(std::int64_t width, std::int64_t per_block) {
  return static_cast<std::size_t>((width + per_block - 1) / per_block);
}

/// n rounded up to whole 16-byte vectors of A.
template <class A>
constexpr int padded(std::int64_t n) {
  constexpr int kV = PlainTile<A>::kVector;
  return static_cast<int>((n + kV - 1) / kV) * kV;
}

}  // namespace moesaic::cuda
