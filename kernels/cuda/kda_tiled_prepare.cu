// Per chunk and head what the scan needs: scaled queries and keys, P, W's two parts. Nothing here depends on the state, so
// all chunks run side by side. The diagonal tiles of A and P go pair by pair in f32, where any decay is safe and an entry
// depends on no later token; the other tiles, whose scales meet at a tile border, are tensor-core products.
#include <utility>

#include "kernels/cuda/kda_tiles.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRow = 68;          // f32 rows of 64; the rest spreads rows over the banks
constexpr int kEarlierPairs = 6;  // (1,0) (2,0) (2,1) (3,0) (3,1) (3,2)

struct Shared {
  union {
    float alpha[kKdaChunk * kKdaDim];
    b16 earlier_keys[kEarlierPairs * kKdaTokens *
                     kKdaDim];        // per pair of tiles (I, J): keys of J scaled to I's start
    b16 values[kKdaChunk * kKdaDim];  // columns of 16
  };
  union {
    struct {
      b16 q[kKdaChunk * kKdaDim];  // later q, k scaled from their tile's start
      b16 k[kKdaChunk * kKdaDim];
    };
    struct {
      float n[kKdaChunk * kRow];  // N
      b16 minus_nb[kKdaChunk * kKdaChunk];
    };
  };
  b16 k_hat[kKdaChunk * kKdaDim];  // k scaled from the chunk's start
  float a[kKdaChunk * kRow];
  b16 p[kKdaChunk * kKdaChunk];
  float decay[kKdaTiles][kKdaDim];  // over each tile
  float beta[kKdaChunk];
};

/// Sums over the lanes of v[0..N): lane l gets that of v[l / (32 / N)], in v[0]. At each step a lane gives away half of its
/// sums to the lane `Bit` away, until one is left.
template <int N, int Size, int Bit = 16>
__device__ __forceinline__ void sum_to_lanes(float (&v)[Size], int lane) {
  if constexpr (N > 1) {
    const bool upper = (lane & Bit) != 0;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float send = upper ? v[i] : v[i + N / 2], keep = upper ? v[i + N / 2] : v[i];
      v[i] = keep + __shfl_xor_sync(0xffffffffU, send, Bit);
    }
    sum_to_lanes<N / 2, Size, Bit / 2>(v, lane);
  } else if constexpr (Bit > 0) {
    v[0] += __shfl_xor_sync(0xffffffffU, v[0], Bit);
    sum_to_lanes<1, Size, Bit / 2>(v, lane);
  }
}

__device__ __forceinline__ float4 widen_4(const b16* p) {
  const uint2 x = *reinterpret_cast<const uint2*>(p);
  return {low_half(x.x), high_half(x.x), low_half(x.y), high_half(x.y)};
}
__device__ __forceinline__ float dot_4(const float4& a, const float4& b) {
  return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}

/// Row R of a diagonal tile for the columns 2 j + half: carries k_i w_ri on by the row's decays and takes its products with
/// the row. A lane has four channels.
template <int R>
__device__ __forceinline__ void tile_row(
    Shared& s, float4 (&decayed)[8], int begin, int half, int lane) {
  constexpr int kUsed = R / 2 + 1, kColumns = kUsed <= 1 ? 1 : kUsed <= 2 ? 2 : kUsed <= 4 ? 4 : 8;
  const int row = begin + R;
  const float4 alpha = *reinterpret_cast<const float4*>(&s.alpha[row * kKdaDim + 4 * lane]);
  const float4 k = widen_4(&s.k[WideTile128::at(row, 4 * lane)]),
               q = widen_4(&s.q[WideTile128::at(row, 4 * lane)]);
  float sums[2 * kColumns];
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    sums[2 * j] = sums[2 * j + 1] = 0.0f;
    if (j >= kUsed) continue;
    float4& kw = decayed[j];
    if (2 * j < R) {
      kw.x *= alpha.x;
      kw.y *= alpha.y;
      kw.z *= alpha.z;
      kw.w *= alpha.w;
    }
    if (j == R / 2 && half == R % 2) kw = k;  // it was zero
    sums[2 * j] = dot_4(kw, k);
    sums[2 * j + 1] = dot_4(kw, q);
  }
  sum_to_lanes<2 * kColumns>(sums, lane);
  const float sum = sums[0];
  constexpr int kLanes = 32 / (2 * kColumns);
  const int index = lane / kLanes, i = 2 * (index / 2) + half;
  if (lane % kLanes != 0 || i > R) return;
  if (index % 2 == 1) {
    s.p[WideTile64::at(row, begin + i)] = __float2bfloat16_rn(sum);
  } else if (i < R) {
    s.a[row * kRow + begin + i] = sum;
  }
}
template <int... R>
__device__ __forceinline__ void tile_rows(
    std::integer_sequence<int, R...>, Shared& s, int begin, int half, int lane) {
  float4 decayed[8] = {};
  (tile_row<R>(s, decayed, begin, half, lane), ...);
}

/// Rows of q, k and decays; rows past the chunk's end are those of a token that changes nothing.
__device__ void load_rows(
    Shared& s, const KdaTiledInput& in, const KdaChunkSpan& chunk, int head, int thread) {
  const int tile = thread / 64, c = thread % 64 * 2;
  const auto* q = static_cast<const b16*>(in.q);
  const auto* k = static_cast<const b16*>(in.k);
#pragma unroll 8
  for (int i = 0; i < kKdaTokens; ++i) {
    const int row = tile * kKdaTokens + i;
    const bool inside = row < chunk.tokens;
    const std::int64_t at = ((chunk.first + row) * in.heads + head) * kKdaDim + c;
    float2 alpha = {1.0f, 1.0f};
    std::uint32_t q2 = 0, k2 = 0;
    if (inside) {
      const float2 g = *reinterpret_cast<const float2*>(in.g + at);
      alpha = {decay_of(g.x), decay_of(g.y)};
      q2 = pair_at(q + at);
      k2 = pair_at(k + at);
    }
    *reinterpret_cast<float2*>(&s.alpha[row * kKdaDim + c]) = alpha;
    pair_at(&s.q[WideTile128::at(row, c)]) = q2;
    pair_at(&s.k[WideTile128::at(row, c)]) = k2;
  }
  if (thread < kKdaChunk) {
    s.beta[thread] =
        thread < chunk.tokens ? in.beta[(chunk.first + thread) * in.heads + head] : 0.0f;
  }
  for (int i = thread; i < kKdaChunk * kKdaChunk / 8; i += kThreads)
    reinterpret_cast<uint4*>(s.p)[i] = uint4{};
}

/// All scaled rows. A thread has one tile's tokens of two channels; it alone reads and replaces their q and k.
__device__ void scale_rows(Shared& s, std::byte* record, int thread) {
  const int tile = thread / 64, c = thread % 64 * 2, begin = tile * kKdaTokens;
  float2 alpha[kKdaTokens], decay{1.0f, 1.0f};
#pragma unroll
  for (int i = 0; i < kKdaTokens; ++i) {
    alpha[i] = *reinterpret_cast<const float2*>(&s.alpha[(begin + i) * kKdaDim + c]);
    decay.x *= alpha[i].x;
    decay.y *= alpha[i].y;
  }
  *reinterpret_cast<float2*>(&s.decay[tile][c]) = decay;
  __syncthreads();  // the last read of s.alpha was above

  float2 tiles[kKdaTiles], before{1.0f, 1.0f};
#pragma unroll
  for (int t = 0; t < kKdaTiles; ++t) {
    tiles[t] = *reinterpret_cast<const float2*>(&s.decay[t][c]);
    if (t < tile) {
      before.x *= tiles[t].x;
      before.y *= tiles[t].y;
    }
  }
  auto* keys_to_end = reinterpret_cast<b16*>(record + KdaRecord::kKeys);
  float2 rest{1.0f, 1.0f};
#pragma unroll
  for (int i = kKdaTokens - 1; i >= 0; --i) {
    const int row = begin + i, at = WideTile128::at(row, c);
    const std::uint32_t k = pair_at(&s.k[at]);
    float2 x{low_half(k) * rest.x, high_half(k) * rest.y};
#pragma unroll
    for (int t = 1; t < kKdaTiles; ++t) {  // to the start of tile t
      if (t <= tile) continue;
      const int pair = t * (t - 1) / 2 + tile;
      pair_at(&s.earlier_keys[WideTile128::at(pair * kKdaTokens + i, c)]) = pack_bf16(x.x, x.y);
      x.x *= tiles[t].x;
      x.y *= tiles[t].y;
    }
    pair_at(keys_to_end + at) = pack_bf16(x.x, x.y);
    rest.x *= alpha[i].x;
    rest.y *= alpha[i].y;
  }
  auto* queries = reinterpret_cast<b16*>(record + KdaRecord::kQueries);
  float2 first{1.0f, 1.0f};
#pragma unroll
  for (int i = 0; i < kKdaTokens; ++i) {
    const int at = WideTile128::at(begin + i, c);
    first.x *= alpha[i].x;
    first.y *= alpha[i].y;
    const std::uint32_t k = pair_at(&s.k[at]), q = pair_at(&s.q[at]);
    const float2 kx{low_half(k) * first.x, high_half(k) * first.y},
        qx{low_half(q) * first.x, high_half(q) * first.y};
    pair_at(&s.k[at]) = pack_bf16(kx.x, kx.y);
    pair_at(&s.q[at]) = pack_bf16(qx.x, qx.y);
    pair_at(&s.k_hat[at]) = pack_bf16(kx.x * before.x, kx.y * before.y);
    pair_at(queries + at) = pack_bf16(qx.x * before.x, qx.y * before.y);
  }
  if (tile == kKdaTiles - 1) {
    auto* total = reinterpret_cast<float*>(record + KdaRecord::kDecay);
    *reinterpret_cast<float2*>(total + c) = {before.x * decay.x, before.y * decay.y};
  }
  if (thread < kKdaChunk)
    reinterpret_cast<float*>(record + KdaRecord::kBeta)[thread] = s.beta[thread];
}

/// The tiles of A and P below the diagonal.
__device__ void earlier_tiles(Shared& s, int warp, int lane) {
  for (int unit = warp; unit < 2 * kEarlierPairs; unit += kThreads / kWarp) {
    const int pair = unit / 2;
    const int later = pair == 0 ? 1 : pair < 3 ? 2 : 3, earlier = pair - later * (later - 1) / 2;
    const b16* rows = unit % 2 == 0 ? s.k : s.q;
    float d[2][4] = {};
#pragma unroll
    for (int c = 0; c < kKdaDim; c += 16) {
      std::uint32_t a[4], b[4];
      load_a<WideTile128>(a, rows, later * kKdaTokens, c, lane);
      load_b<WideTile128>(b, s.earlier_keys, pair * kKdaTokens, c, lane);
      multiply_16(d[0], d[1], a, b);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = later * kKdaTokens + lane / 4,
                column = earlier * kKdaTokens + half * 8 + lane % 4 * 2;
      if (unit % 2 == 0) {
        *reinterpret_cast<float2*>(&s.a[row * kRow + column]) = {d[half][0], d[half][1]};
        *reinterpret_cast<float2*>(&s.a[(row + 8) * kRow + column]) = {d[half][2], d[half][3]};
      } else {
        pair_at(&s.p[WideTile64::at(row, column)]) = pack_bf16(d[half][0], d[half][1]);
        pair_at(&s.p[WideTile64::at(row + 8, column)]) = pack_bf16(d[half][2], d[half][3]);
      }
    }
  }
}

/// N of the diagonal tiles by forward substitution, a column per thread: N_r = A_r - sum_{i<r} A_ri beta_i N_i.
__device__ void solve_diagonal(Shared& s, int thread) {
  const int begin = thread / kKdaTokens * kKdaTokens, column = thread % kKdaTokens;
  float scaled[kKdaTokens];
#pragma unroll
  for (int r = 0; r < kKdaTokens; ++r) {
    const float* a = &s.a[(begin + r) * kRow + begin];
    float x = r > column ? a[column] : 0.0f;
#pragma unroll
    for (int i = 0; i < r; ++i)
      x -= a[i] * scaled[i];
    scaled[r] = s.beta[begin + r] * x;
    s.n[(begin + r) * kRow + begin + column] = x;
  }
}

/// z -= sum_i left_i beta_i right_i over a tile's 16 tokens; right has rows of kRow.
__device__ __forceinline__ void subtract_tile(float4& z,
                                              const float* left,
                                              const float* beta,
                                              const float* right) {
#pragma unroll
  for (int i = 0; i < kKdaTokens; ++i) {
    const float f = left[i] * beta[i];
    const float4 x = *reinterpret_cast<const float4*>(right + i * kRow);
    z.x -= f * x.x;
    z.y -= f * x.y;
    z.z -= f * x.z;
    z.w -= f * x.w;
  }
}

/// The tiles of N below the diagonal, by their distance from it: with Z = A_IJ - sum_{J<=K<I} A_IK B_K N_KJ,
/// N_IJ = Z - N_II B_I Z. A thread has four elements of a row.
__device__ void solve_below(Shared& s, int thread) {
  const int earlier = thread / 64, r = thread % 64 / 4, c = thread % 4 * 4;
  for (int distance = 1; distance < kKdaTiles; ++distance) {
    const int later = earlier + distance, row = later * kKdaTokens + r,
              column = earlier * kKdaTokens + c;
    const bool mine = later < kKdaTiles;
    float4 z{};
    if (mine) {
      z = *reinterpret_cast<const float4*>(&s.a[row * kRow + column]);
      for (int t = earlier; t < later; ++t)
        subtract_tile(z,
                      &s.a[row * kRow + t * kKdaTokens],
                      &s.beta[t * kKdaTokens],
                      &s.n[t * kKdaTokens * kRow + column]);
      *reinterpret_cast<float4*>(&s.n[row * kRow + column]) = z;
    }
    __syncthreads();
    if (mine)
      subtract_tile(z,
                    &s.n[row * kRow + later * kKdaTokens],
                    &s.beta[later * kKdaTokens],
                    &s.n[later * kKdaTokens * kRow + column]);
    __syncthreads();
    if (mine) *reinterpret_cast<float4*>(&s.n[row * kRow + column]) = z;
    __syncthreads();
  }
}

/// -N B for the products here, -B N for backward's.
__device__ void store_inverse(Shared& s, std::byte* record, bool full, int thread) {
  const int row = thread / 4;
  auto* inverse = reinterpret_cast<b16*>(record + KdaRecord::kInverse);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int column = thread % 4 * 2 + i * 8;
    float2 n{};
    if (column / kKdaTokens <= row / kKdaTokens)
      n = *reinterpret_cast<const float2*>(&s.n[row * kRow + column]);
    const int at = WideTile64::at(row, column);
    pair_at(&s.minus_nb[at]) = pack_bf16(-n.x * s.beta[column], -n.y * s.beta[column + 1]);
    if (full) pair_at(inverse + at) = pack_bf16(-n.x * s.beta[row], -n.y * s.beta[row]);
  }
}

/// x becomes (I - N B) x, or its negative: 32 columns per warp, the last tile of rows first, since a tile reads those before.
template <class Tile, bool kNegative>
__device__ __forceinline__ void apply_inverse(const b16* minus_nb, b16* x, int begin, int lane) {
#pragma unroll
  for (int tile = kKdaTiles - 1; tile >= 0; --tile) {
    const int row = tile * kKdaTokens + lane / 4;
    float d[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int column = begin + n * 8 + lane % 4 * 2;
      const std::uint32_t top = pair_at(x + Tile::at(row, column)),
                          bottom = pair_at(x + Tile::at(row + 8, column));
      d[n][0] = low_half(top);
      d[n][1] = high_half(top);
      d[n][2] = low_half(bottom);
      d[n][3] = high_half(bottom);
    }
    for (int t = 0; t <= tile; ++t) {
      std::uint32_t a[4];
      load_a<WideTile64>(a, minus_nb, tile * kKdaTokens, t * kKdaTokens, lane);
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        std::uint32_t b[4];
        load_b_trans<Tile>(b, x, t * kKdaTokens, begin + n * 8, lane);
        multiply_16(d[n], d[n + 1], a, b);
      }
    }
    __syncwarp();
    constexpr float kSign = kNegative ? -1.0f : 1.0f;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int column = begin + n * 8 + lane % 4 * 2;
      pair_at(x + Tile::at(row, column)) = pack_bf16(kSign * d[n][0], kSign * d[n][1]);
      pair_at(x + Tile::at(row + 8, column)) = pack_bf16(kSign * d[n][2], kSign * d[n][3]);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    prepare_kernel(const KdaTiledInput in, const KdaRecords records, const bool full) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const std::int64_t slot = blockIdx.x;
  const int head = in.first_head + static_cast<int>(blockIdx.y);
  const KdaChunkSpan chunk = in.chunks.at(slot);
  if (chunk.tokens <= 0) return;
  std::byte* record = records.at(slot, head);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;

  load_rows(s, in, chunk, head, thread);
  __syncthreads();
  tile_rows(
      std::make_integer_sequence<int, kKdaTokens>(), s, warp / 2 * kKdaTokens, warp % 2, lane);
  scale_rows(s, record, thread);
  __syncthreads();
  earlier_tiles(s, warp, lane);
  __syncthreads();

  const auto* v = static_cast<const b16*>(in.v);
  for (int i = thread; i < kKdaChunk * kKdaDim / 8; i += kThreads) {
    const int row = i / 16, column = i % 16 * 8;
    const bool inside = row < chunk.tokens;
    cp_async_16(&s.values[ColumnTile::at(row, column)],
                v + (inside ? ((chunk.first + row) * in.heads + head) * kKdaDim + column : 0),
                inside);
  }
  cp_async_commit();
  if (thread < kKdaChunk) solve_diagonal(s, thread);
  __syncthreads();
  solve_below(s, thread);
  store_inverse(s, record, full, thread);
  cp_async_wait<0>();
  __syncthreads();
  if (warp < 4) {
    apply_inverse<ColumnTile, false>(s.minus_nb, s.values, warp * 32, lane);
  } else {
    apply_inverse<WideTile128, true>(s.minus_nb, s.k_hat, (warp - 4) * 32, lane);
  }
  __syncthreads();
  copy_to_record(record + KdaRecord::kW, s.values, KdaRecord::kWide, thread, kThreads);
  copy_to_record(record + KdaRecord::kMinus, s.k_hat, KdaRecord::kWide, thread, kThreads);
  copy_to_record(record + KdaRecord::kPairs, s.p, KdaRecord::kSquare, thread, kThreads);
}

}  // namespace

void kda_tiled_prepare(cudaStream_t stream,
                       const KdaTiledInput& in,
                       const KdaRecords& records,
                       bool full) {
  static_assert(2 * (sizeof(Shared) + 1024) <= 228 * 1024, "two blocks share a multiprocessor");
  if (in.chunks.num_slots == 0 || in.num_heads == 0) return;
  MOESAIC_CUDA_CALL(cudaFuncSetAttribute(prepare_kernel,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(sizeof(Shared))));
  const dim3 grid(static_cast<unsigned>(in.chunks.num_slots), static_cast<unsigned>(in.num_heads));
  prepare_kernel<<<grid, kThreads, sizeof(Shared), stream>>>(in, records, full);
  check_launch("kernel kda_chunk: prepare");
}

}  // namespace moesaic::cuda
