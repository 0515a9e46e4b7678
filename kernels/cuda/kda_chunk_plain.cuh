#pragma once
// What the plain kernels of the KDA chunk form share (SPEC 1.4, 1.7). They take any head size and dtype; all of a chunk is
// computed in the accumulation type A. All decays are products of token decays e^g <= 1, taken directly between the two
// tokens they lie between, or between a token and a border of a tile of 16: no exponent is ever positive.
//
// With N = A (I + diag(beta) A)^-1 (strictly lower, A of SPEC 1.4) the solves of both directions become products:
//
//   W = R - N diag(beta) R,  U = diag(beta) W              forward
//   Y = dU - N^T diag(beta) dU,  dR = diag(beta) Y         backward
//
// Kernels: kda_chunk_plain_triangles.cu computes N and P of all chunks side by side; the scans over the chunks of a document,
// forward (kda_chunk_plain_forward.cu) and backward (kda_chunk_plain_backward.cu), run side by side over documents, heads and blocks of
// value columns; kda_chunk_plain_gradients.cu turns what the scans kept into the gradients, again all chunks side by side.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/kda_chunk.h"

namespace moesaic::cuda::kda {

constexpr int kThreads = 256;
constexpr int kMaxChunk = 64;
constexpr int kTile = 16;
constexpr int kTiles = kMaxChunk / kTile;
constexpr int kChannels = 64;  // channels of the state that a scan handles at a time

/// Widths of blocks, per accumulation type: a thread of 256 owns 2 rows x kVec columns of a block of 64 rows x kWidth
/// columns. Operands lie in shared memory with the summed index outermost.
template <class A>
struct Plain {
  static constexpr int kVec = 16 / sizeof(A);
  static constexpr int kWidth = 8 * kVec;
  static constexpr int kLd =
      kMaxChunk + kVec;  // rows of 64: padded, so that columns spread over the banks
  static constexpr int kLdWidth = kWidth + kVec;
};

/// A log decay below this one counts as minus infinity: its exponential is no normal number.
template <class A>
constexpr A kDecayFloor = sizeof(A) == 8 ? A(-708) : A(-87);
/// Below this one its gradient, at most e^g times the scale of the terms it is summed from, is less than their rounding
/// errors, and is 0.
template <class A>
constexpr A kGradientFloor = sizeof(A) == 8 ? A(-45) : A(-20);

template <class A>
__device__ __forceinline__ A decay_of(A g) {
  return g < kDecayFloor<A> ? A(0) : exp(g);
}

/// The op's operands. Rows of q, k, g are heads * K apart, of v heads * V, of beta heads.
template <class T, class A>
struct Operands {
  const T *q, *k, *v;
  const A *g, *beta;
  std::int64_t heads, K, V;
};

/// What is kept per slot and head: P and N [C, C] (entries of the chunk's tiles only; zeros above the diagonal), and, if
/// `full`, the state on entry [K, V] and W [C, V].
template <class A>
struct Records {
  A* base;
  std::int64_t stride, heads, K, V;
  std::int32_t C;
  bool full;

  __device__ A* p(std::int64_t slot, std::int64_t h) const {
    return base + (slot * heads + h) * stride;
  }
  __device__ A* n(std::int64_t slot, std::int64_t h) const { return p(slot, h) + C * C; }
  __device__ A* s(std::int64_t slot, std::int64_t h) const { return p(slot, h) + 2 * C * C; }
  __device__ A* w(std::int64_t slot, std::int64_t h) const { return s(slot, h) + K * V; }
};

/// acc[i][j] += sum over t in [begin, end) of a[t][i] b[t][j]; a and b point at the thread's first row and column.
template <class A>
using Block = A[2][Plain<A>::kVec];
template <class A>
__device__ __forceinline__ void multiply_add(
    Block<A>& acc, const A* a, int lda, const A* b, int ldb, int begin, int end) {
  constexpr int kVec = Plain<A>::kVec;
#pragma unroll 4
  for (int t = begin; t < end; ++t) {
    const auto x = load<2>(a + t * lda);
    const auto y = load<kVec>(b + t * ldb);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      acc[0][j] += x.v[0] * y.v[j];
      acc[1][j] += x.v[1] * y.v[j];
    }
  }
}
/// The same for two products with one b, which is read once: shared memory is what bounds these loops.
template <class A>
__device__ __forceinline__ void multiply_add_two(Block<A>& acc0,
                                                 Block<A>& acc1,
                                                 const A* a0,
                                                 const A* a1,
                                                 int lda,
                                                 const A* b,
                                                 int ldb,
                                                 int begin,
                                                 int end) {
  constexpr int kVec = Plain<A>::kVec;
#pragma unroll 4
  for (int t = begin; t < end; ++t) {
    const auto x0 = load<2>(a0 + t * lda), x1 = load<2>(a1 + t * lda);
    const auto y = load<kVec>(b + t * ldb);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      acc0[0][j] += x0.v[0] * y.v[j];
      acc0[1][j] += x0.v[1] * y.v[j];
      acc1[0][j] += x1.v[0] * y.v[j];
      acc1[1][j] += x1.v[1] * y.v[j];
    }
  }
}
template <class A>
__device__ __forceinline__ void clear(Block<A>& acc) {
#pragma unroll
  for (int j = 0; j < Plain<A>::kVec; ++j)
    acc[0][j] = acc[1][j] = A(0);
}
template <class A>
__device__ __forceinline__ void store_block(A* out, int ld, const Block<A>& x) {
  constexpr int kVec = Plain<A>::kVec;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    Vec<A, kVec> row;
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      row.v[j] = x[i][j];
    store<kVec>(out + i * ld, row);
  }
}

/// Moves an N x M array, AtOnce of a thread's elements read before the first of them is written: write(i, j, read(i, j)).
/// A warp takes 8 neighbouring j of 4 neighbouring i, so that memory in rows of j is read whole sectors at a time, and
/// shared memory in padded rows of i is written without bank conflicts.
template <int N, int M, int AtOnce, class Read, class Write>
__device__ __forceinline__ void move_transposed(const Read& read, const Write& write) {
  constexpr int kCount = N * M / kThreads;
  static_assert(N % 4 == 0 && M % 8 == 0 && kCount % AtOnce == 0 && N * M % kThreads == 0);
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x); first < N * M; first += AtOnce * kThreads) {
    decltype(read(0, 0)) x[AtOnce];
#pragma unroll
    for (int u = 0; u < AtOnce; ++u) {
      const int e = first + u * kThreads, piece = e / 32;
      x[u] = read(piece / (M / 8) * 4 + e / 8 % 4, piece % (M / 8) * 8 + e % 8);
    }
#pragma unroll
    for (int u = 0; u < AtOnce; ++u) {
      const int e = first + u * kThreads, piece = e / 32;
      write(piece / (M / 8) * 4 + e / 8 % 4, piece % (M / 8) * 8 + e % 8, x[u]);
    }
  }
}

/// One channel of one tile: 16 tokens. Rows of tokens beyond `tokens` are padding that changes nothing.
template <class T, class A>
struct TileColumn {
  A alpha[kTile], k[kTile], q[kTile];

  /// `row` = first token of the tile * heads + head.
  template <bool WithQ>
  __device__ __forceinline__ void read(const Operands<T, A>& in,
                                       std::int64_t row,
                                       std::int64_t c,
                                       int tokens) {
#pragma unroll
    for (int j = 0; j < kTile; ++j) {
      const bool valid = j < tokens && c < in.K;
      const std::int64_t at = (row + j * in.heads) * in.K + c;
      alpha[j] = valid ? in.g[at] : A(0);
      k[j] = valid ? widen<A>(in.k[at]) : A(0);
      if constexpr (WithQ) q[j] = valid ? widen<A>(in.q[at]) : A(0);
    }
#pragma unroll
    for (int j = 0; j < kTile; ++j)
      alpha[j] = decay_of(alpha[j]);
  }
  /// Decay over the whole tile.
  __device__ __forceinline__ A total() const {
    A product = alpha[0];
#pragma unroll
    for (int j = 1; j < kTile; ++j)
      product *= alpha[j];
    return product;
  }
  /// Decay from the tile's start to each token, the token's own included.
  __device__ __forceinline__ void from_start(A (&first)[kTile]) const {
    first[0] = alpha[0];
#pragma unroll
    for (int j = 1; j < kTile; ++j)
      first[j] = first[j - 1] * alpha[j];
  }
  /// Decay from each token, its own excluded, to the tile's end.
  __device__ __forceinline__ void to_end(A (&rest)[kTile]) const {
    rest[kTile - 1] = A(1);
#pragma unroll
    for (int j = kTile - 2; j >= 0; --j)
      rest[j] = rest[j + 1] * alpha[j + 1];
  }
};

/// Products of tiles' decays [kTiles][ld] of channel c over the tiles in [begin, end).
template <class A>
__device__ __forceinline__ A decay_between(const A* totals, int ld, int c, int begin, int end) {
  A product = A(1);
  for (int t = begin; t < end; ++t)
    product *= totals[t * ld + c];
  return product;
}
/// Writes 16 values to consecutive places.
template <class A>
__device__ __forceinline__ void store_column(A* out, const A (&x)[kTile]) {
  constexpr int kVec = Plain<A>::kVec;
#pragma unroll
  for (int j = 0; j < kTile; j += kVec) {
    Vec<A, kVec> v;
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      v.v[i] = x[j + i];
    store<kVec>(out + j, v);
  }
}
template <class A>
__device__ __forceinline__ void store_strided(A* out, int ld, const A (&x)[kTile]) {
#pragma unroll
  for (int j = 0; j < kTile; ++j)
    out[j * ld] = x[j];
}

__device__ __forceinline__ int rows_of(int tokens) {
  return (tokens + kTile - 1) / kTile * kTile;
}

// The kernels' launchers; `context` gives the stream. Defined for the pairs (T, A) of the op.
template <class T, class A>
void plain_triangles(const CudaContext& context,
                     const ChunkTable& chunks,
                     const Operands<T, A>& in,
                     const Records<A>& records);

/// One block of threads per document, head and kWidth value columns. `o` null: only the records are wanted.
template <class T, class A>
struct ForwardScan {
  Operands<T, A> in;
  Records<A> records;
  T* o;
  KdaStates<const A> s0;
  KdaStates<A> s_final;
  A* state;  ///< from scan_state_numel
};
template <class T, class A>
void plain_forward(const CudaContext& context,
                   const ChunkTable& chunks,
                   const ForwardScan<T, A>& scan);

/// `ds_exit` [slots, heads, K, V] gets the gradient of the state after each chunk, `y` [T, heads, V] Y.
template <class T, class A>
struct BackwardScan {
  Operands<T, A> in;
  Records<A> records;
  const T* d_o;
  KdaStates<const A> ds_final;
  KdaStates<A> ds0;
  A *ds_exit, *y;
  A* state;
};
template <class T, class A>
void plain_backward(const CudaContext& context,
                    const ChunkTable& chunks,
                    const BackwardScan<T, A>& scan);

/// dv may be d_o.
template <class T, class A>
struct Gradients {
  Operands<T, A> in;
  Records<A> records;
  const T* d_o;
  const A *ds_exit, *y;
  T *dq, *dk, *dv;
  A *dg, *dbeta;
};
template <class T, class A>
void plain_gradients(const CudaContext& context,
                     const ChunkTable& chunks,
                     const Gradients<T, A>& gradients);

/// Elements of memory for the states of a scan; 0 where they fit in shared memory.
constexpr std::int64_t kMaxSharedState = 96 * 1024;  // bytes
template <class A>
constexpr std::int64_t state_rows(std::int64_t K) {
  return (K + kChannels - 1) / kChannels * kChannels;
}
template <class A>
constexpr bool state_is_shared(std::int64_t K) {
  return state_rows<A>(K) * Plain<A>::kWidth * static_cast<std::int64_t>(sizeof(A)) <=
         kMaxSharedState;
}
template <class A>
constexpr std::int64_t scan_blocks(const ChunkTable& chunks, std::int64_t heads, std::int64_t V) {
  return chunks.documents * heads * ((V + Plain<A>::kWidth - 1) / Plain<A>::kWidth);
}
template <class A>
constexpr std::int64_t scan_state_numel(const ChunkTable& chunks,
                                        std::int64_t heads,
                                        std::int64_t K,
                                        std::int64_t V) {
  return state_is_shared<A>(K)
             ? 0
             : scan_blocks<A>(chunks, heads, V) * state_rows<A>(K) * Plain<A>::kWidth;
}

/// Lets a kernel have `bytes` of shared memory, and starts it.
template <class... Parameters, class... Arguments>
void start(const CudaContext& context,
           const char* name,
           void (*kernel)(Parameters...),
           std::int64_t blocks,
           int threads,
           std::size_t bytes,
           const Arguments&... arguments) {
  if (blocks == 0) return;
  const auto stream = native_stream(context);
  MOESAIC_CUDA_CALL(cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), bytes, stream>>>(
      arguments...);
  check_launch(name);
}

}  // namespace moesaic::cuda::kda
