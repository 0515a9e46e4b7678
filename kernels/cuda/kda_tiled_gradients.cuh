#pragma once
// The gradients of a chunk (kda_tiled_gradients.cu): the block's shared memory, and its last pass, channel by channel.
#include "kernels/cuda/kda_tiles.cuh"

namespace moesaic::cuda::kda_gradients {

constexpr int kThreads = 512;
constexpr int kSlabs = 8;  // of 16 value channels, for <S, dS'>

struct Shared {
  union {
    struct {
      b16 state[kKdaDim * kKdaDim];    // S^T
      b16 d_state[kKdaDim * kKdaDim];  // dS'^T
      b16 w[kKdaChunk * kKdaDim];      // in columns; then U
      b16 du[kKdaChunk * kKdaDim];     // in columns; then dR
    };
    struct {  // sums before the scale within the tile; see sum_at
      float dq[kKdaChunk * kKdaDim], k_row[kKdaChunk * kKdaDim], k_column[kKdaChunk * kKdaDim];
    };
  };
  union {
    b16 d_o[kKdaChunk * kKdaDim];
    b16 out_q[kKdaChunk * kKdaDim];  // dq, dk on their way out
  };
  union {
    b16 q_row[kKdaChunk * kKdaDim];  // q, k scaled from their tile's start
    b16 out_k[kKdaChunk * kKdaDim];
  };
  b16 k_row_scaled[kKdaChunk * kKdaDim];
  b16 k_end[kKdaChunk * kKdaDim];  // k scaled to their tile's end
  b16 minus_bn[kKdaChunk * kKdaChunk];
  b16 dp[kKdaChunk * kKdaChunk], da[kKdaChunk * kKdaChunk];  // below the diagonal tiles
  float dp_tile[kKdaTiles][kKdaTokens][kKdaTokens],
      da_tile[kKdaTiles][kKdaTokens][kKdaTokens];  // the diagonal ones
  float decay[kKdaTiles][kKdaDim];
  float ends[kKdaTiles][kKdaDim];       // sums of a tile's Kb dKb
  float states[kSlabs][kKdaDim];        // partial <S, dS'> per key
  float tile_sums[kKdaTiles][kKdaDim];  // decay gradient of each tile
  float dbeta[4][kKdaChunk];            // by columns of 32
  float beta[kKdaChunk];
  std::uint64_t barrier;
};

/// Element of dq, k_row, k_column: rows 8 columns apart in the banks.
__device__ __forceinline__ int sum_at(int row, int column) {
  return row * kKdaDim + (column ^ ((row & 7) << 3));
}

struct Block {
  const KdaTiledInput& in;
  const KdaTiledGradients& out;
  KdaChunkSpan chunk;
  int head, thread, warp, lane;

  __device__ std::int64_t at(int row, int column) const {
    return ((chunk.first + row) * in.heads + head) * kKdaDim + column;
  }
};

/// A channel's tokens in one tile.
struct Tokens {
  float alpha[kKdaTokens], q[kKdaTokens], k[kKdaTokens];
  unsigned forgets;  // bit i: the decay is too strong for a gradient

  __device__ __forceinline__ void load(const Block& b, int begin, int channel) {
    const auto* queries = static_cast<const b16*>(b.in.q);
    const auto* keys = static_cast<const b16*>(b.in.k);
    const std::int64_t stride = std::int64_t{b.in.heads} * kKdaDim;
    std::int64_t at = b.at(begin, channel);
    forgets = 0;
#pragma unroll
    for (int i = 0; i < kKdaTokens; ++i, at += stride) {
      alpha[i] = 1.0f;
      q[i] = k[i] = 0.0f;
      if (begin + i < b.chunk.tokens) {
        const float g = b.in.g[at];
        alpha[i] = decay_of(g);
        if (g < -20.0f) forgets |= 1U << i;
        q[i] = __bfloat162float(queries[at]);
        k[i] = __bfloat162float(keys[at]);
      }
    }
  }
};

template <class Tile>
__device__ __forceinline__ void store_rows(const Block& b, b16* to, const b16* tile) {
  const bool aligned = is_aligned_16(to);
  for (int i = b.thread; i < kKdaChunk * kKdaDim / 8; i += kThreads) {
    const int row = i / 16, column = i % 16 * 8;
    if (row < b.chunk.tokens)
      store_16(to + b.at(row, column),
               *reinterpret_cast<const uint4*>(tile + Tile::at(row, column)),
               aligned);
  }
}

/// The rows' side of a tile in one channel: sum_{i<r} of dP_ri k_i w_ri and dA_ri k_i w_ri by Horner's rule in the decays,
/// then dq. Leaves the row's part of the decay's gradient in s.dq and krow in s.k_row; the thread alone reads them.
/// The pair of a token with itself has no decay and joins dq and dk only.
__device__ __forceinline__ void finish_rows(
    Shared& s, const Block& b, const Tokens& x, int tile, int c) {
  const int begin = tile * kKdaTokens;
  float first = 1.0f;
#pragma unroll
  for (int r = 0; r < kKdaTokens; ++r) {
    float row_q = 0.0f, row_k = 0.0f;
#pragma unroll
    for (int four = 0; four < r; four += 4) {
      const auto dp = load<4>(&s.dp_tile[tile][r][four]), da = load<4>(&s.da_tile[tile][r][four]);
#pragma unroll
      for (int i = four; i < four + 4 && i < r; ++i) {
        row_q = row_q * x.alpha[i] + dp.v[i - four] * x.k[i];
        row_k = row_k * x.alpha[i] + da.v[i - four] * x.k[i];
      }
    }
    row_q *= x.alpha[r];
    row_k *= x.alpha[r];
    first *= x.alpha[r];
    const int at = sum_at(begin + r, c), wide = WideTile128::at(begin + r, c);
    const float q = x.q[r], k = x.k[r], dq = s.dq[at], k_row = s.k_row[at];
    s.dq[at] = __bfloat162float(s.q_row[wide]) * dq +
               __bfloat162float(s.k_row_scaled[wide]) * k_row + q * row_q + k * row_k;
    s.k_row[at] = first * k_row + row_k;
    s.out_q[wide] = __float2bfloat16_rn(first * dq + row_q + s.dp_tile[tile][r][r] * k);
  }
}
/// The columns' side, sum_{r>i} (dP_ri q_r + dA_ri k_r) w_ri, then dk. `column` starts as zeros and ends as the suffix sums
/// of the decay's gradient within the tile.
__device__ __forceinline__ void finish_columns(
    Shared& s, const Tokens& x, int tile, int c, float (&column)[kKdaTokens]) {
  const int begin = tile * kKdaTokens;
  float rest = 1.0f, running = 0.0f;
#pragma unroll
  for (int r = kKdaTokens - 1; r >= 0; --r) {
    const float q = x.q[r], k = x.k[r];
#pragma unroll
    for (int four = 0; four < r; four += 4) {
      const auto dp = load<4>(&s.dp_tile[tile][r][four]), da = load<4>(&s.da_tile[tile][r][four]);
#pragma unroll
      for (int i = four; i < four + 4 && i < r; ++i)
        column[i] = (column[i] + dp.v[i - four] * q + da.v[i - four] * k) * x.alpha[r];
    }
    const int at = sum_at(begin + r, c), wide = WideTile128::at(begin + r, c);
    const float k_column = s.k_column[at];
    running += s.dq[at] - __bfloat162float(s.k_end[wide]) * k_column - k * column[r];
    s.out_k[wide] =
        __float2bfloat16_rn(s.k_row[at] + rest * k_column + column[r] + s.dp_tile[tile][r][r] * q);
    column[r] = running;
    rest *= x.alpha[r];
  }
}

/// A thread has a tile's tokens of one channel: the scale within the tile, the tile's own pairs, dq and dk, and the suffix
/// sums that are dg.
__device__ __forceinline__ void finish(Shared& s, const Block& b) {
  const int tile = b.thread / kKdaDim, c = b.thread % kKdaDim, begin = tile * kKdaTokens;
  Tokens x;
  x.load(b, begin, c);
  finish_rows(s, b, x, tile, c);
  float dg[kKdaTokens] = {};
  finish_columns(s, x, tile, c, dg);
  s.tile_sums[tile][c] = dg[0];
  __syncthreads();
  float product = 0.0f, total = 1.0f, later = 0.0f;
#pragma unroll
  for (int i = 0; i < kSlabs; ++i)
    product += s.states[i][c];
#pragma unroll
  for (int t = 0; t < kKdaTiles; ++t) {
    total *= s.decay[t][c];
    later += s.ends[t][c];
  }
  later += total * product;
#pragma unroll
  for (int t = kKdaTiles - 1; t > 0; --t) {
    if (t > tile) later += s.tile_sums[t][c];
  }
  store_rows<WideTile128>(b, static_cast<b16*>(b.out.dq), s.out_q);
  store_rows<WideTile128>(b, static_cast<b16*>(b.out.dk), s.out_k);
#pragma unroll
  for (int r = 0; r < kKdaTokens; ++r) {
    s.dq[sum_at(begin + r, c)] = (x.forgets >> r & 1U) != 0 ? 0.0f : dg[r] + later;
  }
  __syncthreads();
  const bool aligned = is_aligned_16(b.out.dg);
  for (int i = b.thread; i < kKdaChunk * kKdaDim / 4; i += kThreads) {
    const int row = i / (kKdaDim / 4), column = i % (kKdaDim / 4) * 4;
    if (row >= b.chunk.tokens) continue;
    const auto four = load<4>(&s.dq[sum_at(row, column)]);
    float* to = b.out.dg + b.at(row, column);
    if (aligned) {
      store<4>(to, four);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        to[j] = four.v[j];
    }
  }
}

}  // namespace moesaic::cuda::kda_gradients
