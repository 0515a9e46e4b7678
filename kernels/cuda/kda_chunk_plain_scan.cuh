#pragma once
// What the scans over a document's chunks share: the state of one head and kWidth value columns, [state_rows][kWidth], and
// blocks of 64 channels of a chunk's keys and queries, scaled to a border of the chunk.
#include "kernels/cuda/kda_chunk_plain.cuh"

namespace moesaic::cuda::kda {

/// Where a block of threads works.
template <class A>
struct ScanPlace {
  std::int64_t document, h, v0;
  int columns;  ///< of the value head here, <= kWidth

  __device__ ScanPlace(std::int64_t heads, std::int64_t V) {
    constexpr int kWidth = Plain<A>::kWidth;
    const std::int64_t per_head = (V + kWidth - 1) / kWidth, block = blockIdx.x;
    v0 = block % per_head * kWidth;
    h = block / per_head % heads;
    document = block / per_head / heads;
    columns = V - v0 < kWidth ? static_cast<int>(V - v0) : kWidth;
  }
  /// Element (0, v0) of this head's [K, V] matrix in a tensor of [.., heads, K, V].
  __device__ std::int64_t state_at(std::int64_t i,
                                   std::int64_t heads,
                                   std::int64_t K,
                                   std::int64_t V) const {
    return (i * heads + h) * K * V + v0;
  }
};

/// Copies between the state and rows of a [K, V] matrix; a null source is zeros. Padding becomes zeros.
template <class A>
__device__ __forceinline__ void load_state(
    A* state, const A* in, std::int64_t K, std::int64_t V, int columns) {
  constexpr int kWidth = Plain<A>::kWidth;
  const int j = static_cast<int>(threadIdx.x) % kWidth;
  for (std::int64_t c = threadIdx.x / kWidth; c < state_rows<A>(K); c += kThreads / kWidth)
    state[c * kWidth + j] = in != nullptr && c < K && j < columns ? in[c * V + j] : A(0);
}
template <class A>
__device__ __forceinline__ void save_state(
    A* out, const A* state, std::int64_t K, std::int64_t V, int columns) {
  constexpr int kWidth = Plain<A>::kWidth;
  const int j = static_cast<int>(threadIdx.x) % kWidth;
  if (j >= columns) return;
  for (std::int64_t c = threadIdx.x / kWidth; c < K; c += kThreads / kWidth)
    out[c * V + j] = state[c * kWidth + j];
}

/// state = diag(total) state + acc, in the 64 channels from c0 on: the thread's 2 rows x kVec columns.
template <class A>
__device__ __forceinline__ void advance_state(
    A* state, std::int64_t c0, const A* total, int r, int column, const Block<A>& acc) {
  constexpr int kVec = Plain<A>::kVec, kWidth = Plain<A>::kWidth;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    A* row = state + (c0 + r + i) * kWidth + column;
    auto s = load<kVec>(row);
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      s.v[j] = total[r + i] * s.v[j] + acc[i][j];
    store<kVec>(row, s);
  }
}

/// The tile of one channel that this thread loads, with the decays of the chunk's other tiles: needs a barrier between
/// begin() and what follows. All threads call both.
template <class T, class A>
struct ChannelLoader {
  static_assert(kThreads == kChannels * kTiles);
  TileColumn<T, A> column;
  int c, t;
  A before = A(1), after = A(1), total = A(1);

  template <bool WithQ>
  __device__ __forceinline__ void begin(
      A* totals, const Operands<T, A>& in, std::int64_t row0, std::int64_t c0, int tokens) {
    c = static_cast<int>(threadIdx.x) % kChannels;
    t = static_cast<int>(threadIdx.x) / kChannels;
    column.template read<WithQ>(in, row0 + t * kTile * in.heads, c0 + c, tokens - t * kTile);
    totals[t * kChannels + c] = column.total();
  }
  __device__ __forceinline__ void finish(const A* totals) {
    before = decay_between(totals, kChannels, c, 0, t);
    after = decay_between(totals, kChannels, c, t + 1, kTiles);
    total = decay_between(totals, kChannels, c, 0, kTiles);
  }
  /// The decay from the chunk's start to each token; from each token to the chunk's end.
  __device__ __forceinline__ void from_chunk_start(A (&x)[kTile]) const {
    column.from_start(x);
#pragma unroll
    for (int j = 0; j < kTile; ++j)
      x[j] *= before;
  }
  __device__ __forceinline__ void to_chunk_end(A (&x)[kTile]) const {
    column.to_end(x);
#pragma unroll
    for (int j = 0; j < kTile; ++j)
      x[j] *= after;
  }
};

template <class A>
__device__ __forceinline__ void scale_column(A (&x)[kTile], const A (&by)[kTile]) {
#pragma unroll
  for (int j = 0; j < kTile; ++j)
    x[j] *= by[j];
}

/// A thread's part of rows [rows][columns] of a tensor, `stride` apart; zeros outside of tokens x columns.
template <class A, class T>
__device__ __forceinline__ void read_rows(
    Block<A>& x, const T* in, std::int64_t stride, int r, int column, int tokens, int columns) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < Plain<A>::kVec; ++j) {
      x[i][j] = r + i < tokens && column + j < columns ? widen<A>(in[(r + i) * stride + column + j])
                                                       : A(0);
    }
  }
}
template <class A, class T>
__device__ __forceinline__ void write_rows(
    T* out, std::int64_t stride, const Block<A>& x, int r, int column, int tokens, int columns) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < Plain<A>::kVec; ++j) {
      if (r + i < tokens && column + j < columns)
        out[(r + i) * stride + column + j] = round_to<T>(x[i][j]);
    }
  }
}
/// out = beta (.) x, row by row.
template <class A>
__device__ __forceinline__ void scale_rows(Block<A>& out, const Block<A>& x, const A* beta) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < Plain<A>::kVec; ++j)
      out[i][j] = beta[i] * x[i][j];
  }
}

}  // namespace moesaic::cuda::kda
