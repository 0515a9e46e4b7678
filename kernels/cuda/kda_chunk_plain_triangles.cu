// P and N of every chunk and head (kda_chunk_plain.cuh). A warp owns a pair of tiles, 16 rows r by 16 columns i, and walks down
// the rows with k_i w_ri in a register: w_ri = alpha_{i+1} ... alpha_r is built factor by factor, for the tiles on the
// diagonal from the pair itself on.
#include "kernels/cuda/kda_chunk_plain.cuh"

namespace moesaic::cuda::kda {
namespace {

template <class A>
struct TriangleMemory {
  using W = Plain<A>;
  static constexpr int kOperand = W::kWidth * W::kLd;  // [channel][token]
  static constexpr int kSquare = kMaxChunk * W::kLd;
  static constexpr int kShared = 4 * kOperand > 2 * kSquare ? 4 * kOperand : 2 * kSquare;

  A *q, *k, *alpha, *k_rest;  // operands of some channels
  A *n, *l;                   // N; A diag(beta). In the same place, afterwards
  A *totals, *beta;           // [kTiles][kWidth], [kMaxChunk]

  __device__ explicit TriangleMemory(A* base)
      : q(base),
        k(q + kOperand),
        alpha(k + kOperand),
        k_rest(alpha + kOperand),
        n(base),
        l(n + kSquare),
        totals(base + kShared),
        beta(totals + kTiles * W::kWidth) {}
  static constexpr std::size_t kBytes = (kShared + kTiles * W::kWidth + kMaxChunk) * sizeof(A);
};

template <class T, class A>
__device__ __forceinline__ void load_channels(const TriangleMemory<A>& m,
                                              const Operands<T, A>& in,
                                              std::int64_t row0,
                                              std::int64_t c0,
                                              int tokens) {
  using W = Plain<A>;
  const int c = static_cast<int>(threadIdx.x) % W::kWidth,
            t = static_cast<int>(threadIdx.x) / W::kWidth;
  if (t * kTile >= tokens) return;
  TileColumn<T, A> column;
  column.template read<true>(in, row0 + t * kTile * in.heads, c0 + c, tokens - t * kTile);
  A rest[kTile];
  column.to_end(rest);
#pragma unroll
  for (int j = 0; j < kTile; ++j)
    rest[j] *= column.k[j];
  const int at = c * W::kLd + t * kTile;
  store_column(m.q + at, column.q);
  store_column(m.k + at, column.k);
  store_column(m.alpha + at, column.alpha);
  store_column(m.k_rest + at, rest);
  m.totals[t * W::kWidth + c] = column.total();
}

/// Adds the channels at hand to A and P of rows 16 I + j and this lane's column; lanes 16 apart share a column and take
/// every second channel.
template <class A>
__device__ __forceinline__ void add_pairs(
    const TriangleMemory<A>& m, int I, int J, int channels, A (&a)[kTile], A (&p)[kTile]) {
  using W = Plain<A>;
  constexpr int kVec = W::kVec;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, i = lane % kTile;
  for (int c = lane / kTile; c < channels; c += 2) {
    const A own = m.k[c * W::kLd + J * kTile + i];
    A kw = 0;
    if (J < I)
      kw = m.k_rest[c * W::kLd + J * kTile + i] * decay_between(m.totals, W::kWidth, c, J + 1, I);
    const int at = c * W::kLd + I * kTile;
#pragma unroll
    for (int j0 = 0; j0 < kTile; j0 += kVec) {
      const auto alpha = load<kVec>(m.alpha + at + j0);
      const auto k = load<kVec>(m.k + at + j0);
      const auto q = load<kVec>(m.q + at + j0);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        kw *= alpha.v[j];
        if (J == I && j0 + j == i) kw = own;
        a[j0 + j] += kw * k.v[j];
        p[j0 + j] += kw * q.v[j];
      }
    }
  }
}

/// N from A by forward substitution, tile by tile of 16 rows: N_r = A_r - sum_{i < r} A_ri beta_i N_i.
template <class A>
__device__ __forceinline__ void substitute(const TriangleMemory<A>& m, int tiles) {
  constexpr int kLd = Plain<A>::kLd;
  const int tid = static_cast<int>(threadIdx.x);
  for (int t = 0; t < tiles; ++t) {
    const int begin = t * kTile;
    for (int e = tid; e < kTile * kMaxChunk; e += static_cast<int>(blockDim.x)) {
      const int j = e % kMaxChunk, r = begin + e / kMaxChunk;
      if (j >= begin) continue;
      A sum = 0;
      for (int i = j / kTile * kTile; i < begin; ++i)
        sum += m.l[r * kLd + i] * m.n[i * kLd + j];
      m.n[r * kLd + j] -= sum;
    }
    __syncthreads();
    for (int j = tid; j < begin + kTile; j += static_cast<int>(blockDim.x)) {
      A x[kTile];
#pragma unroll
      for (int r = 0; r < kTile; ++r) {
        x[r] = m.n[(begin + r) * kLd + j];
#pragma unroll
        for (int i = 0; i < r; ++i)
          x[r] -= m.l[(begin + r) * kLd + begin + i] * x[i];
        m.n[(begin + r) * kLd + j] = x[r];
      }
    }
    __syncthreads();
  }
}

/// blockDim = a warp per pair of tiles of a full chunk.
template <class T, class A>
__global__ void __launch_bounds__(kTiles*(kTiles + 1) / 2 * kWarp)
    triangles_kernel(ChunkTable chunks, Operands<T, A> in, Records<A> records) {
  using W = Plain<A>;
  extern __shared__ __align__(16) unsigned char shared[];
  const TriangleMemory<A> m(reinterpret_cast<A*>(shared));
  const std::int64_t slot = blockIdx.x / in.heads, h = blockIdx.x % in.heads;
  const auto span = chunks.at(slot);
  if (span.tokens == 0) return;
  const int rows = rows_of(span.tokens), tiles = rows / kTile;
  const std::int64_t row0 = span.first * in.heads + h;
  const int tid = static_cast<int>(threadIdx.x);
  for (int r = tid; r < rows; r += static_cast<int>(blockDim.x))
    m.beta[r] = r < span.tokens ? in.beta[row0 + r * in.heads] : A(0);

  int I = 0, J = tid / kWarp;  // this warp's pair of tiles, J <= I
  while (J > I)
    J -= ++I;
  A a[kTile] = {}, p[kTile] = {};
  for (std::int64_t c0 = 0; c0 < in.K; c0 += W::kWidth) {
    __syncthreads();
    load_channels(m, in, row0, c0, span.tokens);
    __syncthreads();
    const std::int64_t left = in.K - c0;
    if (I < tiles) add_pairs(m, I, J, left < W::kWidth ? static_cast<int>(left) : W::kWidth, a, p);
  }
  __syncthreads();  // N and L overwrite the operands
  A* p_out = records.p(slot, h);
  if (I < tiles) {
    const int i = J * kTile + tid % kTile;
    const bool writes_a = tid % kWarp < kTile;
#pragma unroll
    for (int j = 0; j < kTile; ++j) {
      const int r = I * kTile + j;
      const A sum_a = a[j] + __shfl_xor_sync(0xffffffffU, a[j], kTile);
      const A sum_p = p[j] + __shfl_xor_sync(0xffffffffU, p[j], kTile);
      if (writes_a) {
        const A x = i < r ? sum_a : A(0);
        m.n[r * W::kLd + i] = x;
        m.l[r * W::kLd + i] = x * m.beta[i];
        if (J < I) m.n[i * W::kLd + r] = A(0);
      } else {
        p_out[r * chunks.chunk_size + i] = sum_p;
        if (J < I) p_out[i * chunks.chunk_size + r] = A(0);
      }
    }
  }
  __syncthreads();
  substitute(m, tiles);
  A* n_out = records.n(slot, h);
  for (int e = tid; e < rows * kMaxChunk; e += static_cast<int>(blockDim.x)) {
    const int r = e / kMaxChunk, i = e % kMaxChunk;
    if (i < rows) n_out[r * chunks.chunk_size + i] = m.n[r * W::kLd + i];
  }
}

}  // namespace

template <class T, class A>
void plain_triangles(const CudaContext& context,
                     const ChunkTable& chunks,
                     const Operands<T, A>& in,
                     const Records<A>& records) {
  const int tiles = chunks.chunk_size / kTile;
  start(context,
        "kernel kda_chunk: triangles",
        triangles_kernel<T, A>,
        chunks.num_slots * in.heads,
        tiles * (tiles + 1) / 2 * kWarp,
        TriangleMemory<A>::kBytes,
        chunks,
        in,
        records);
}

template void plain_triangles(const CudaContext&,
                              const ChunkTable&,
                              const Operands<double, double>&,
                              const Records<double>&);
template void plain_triangles(const CudaContext&,
                              const ChunkTable&,
                              const Operands<float, float>&,
                              const Records<float>&);
template void plain_triangles(const CudaContext&,
                              const ChunkTable&,
                              const Operands<__nv_bfloat16, float>&,
                              const Records<float>&);

}  // namespace moesaic::cuda::kda
