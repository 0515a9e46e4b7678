// All gradients of a chunk from its record, the state's gradient dS' and dU (SPEC 1.7): one block per chunk and head. Sums
// over tiles start as the state's part and are carried from tile to tile by the tiles' decays. The decay's gradient takes
// its products with the very operands, rounded, that the sums were made of: what a row adds and its column takes away then
// cancels to f32, and dg keeps its accuracy under strong decays.
#include "kernels/cuda/kda_tiled_gradients.cuh"

namespace moesaic::cuda {
namespace {

using namespace kda_gradients;  // NOLINT(google-build-using-namespace): the parts of this file

/// Starts the copies, scales rows.
__device__ void load_operands(Shared& s,
                              const Block& b,
                              const std::byte* record,
                              const std::byte* gradient) {
  if (b.thread == 0) {
    mbarrier_init(&s.barrier, 1);
    fence_mbarrier_init();
    constexpr int kState = kKdaDim * kKdaDim * 2;
    mbarrier_arrive_expect(&s.barrier, 2 * kState + 2 * KdaRecord::kWide + KdaRecord::kSquare);
    bulk_load(s.state, record + KdaRecord::kState, kState, &s.barrier);
    bulk_load(s.d_state, gradient + KdaGradientRecord::kDs, kState, &s.barrier);
    bulk_load(s.w, record + KdaRecord::kW, KdaRecord::kWide, &s.barrier);
    bulk_load(s.du, gradient + KdaGradientRecord::kDu, KdaRecord::kWide, &s.barrier);
    bulk_load(s.minus_bn, record + KdaRecord::kInverse, KdaRecord::kSquare, &s.barrier);
  }
  const auto* d_o = static_cast<const b16*>(b.out.d_o);
  const bool aligned = is_aligned_16(d_o);
  for (int i = b.thread; i < kKdaChunk * kKdaDim / 8; i += kThreads) {
    const int row = i / 16, column = i % 16 * 8;
    uint4 x{};
    if (row < b.chunk.tokens) x = load_16(d_o + b.at(row, column), aligned);
    *reinterpret_cast<uint4*>(&s.d_o[WideTile128::at(row, column)]) = x;
  }
  if (b.thread < kKdaChunk) {
    s.beta[b.thread] = b.thread < b.chunk.tokens
                           ? b.in.beta[(b.chunk.first + b.thread) * b.in.heads + b.head]
                           : 0.0f;
  }
  const int tile = b.thread / kKdaDim, c = b.thread % kKdaDim, begin = tile * kKdaTokens;
  Tokens x;
  x.load(b, begin, c);
  float first = 1.0f, rest = 1.0f;
#pragma unroll
  for (int i = 0; i < kKdaTokens; ++i) {
    first *= x.alpha[i];
    s.q_row[WideTile128::at(begin + i, c)] = __float2bfloat16_rn(x.q[i] * first);
    s.k_row_scaled[WideTile128::at(begin + i, c)] = __float2bfloat16_rn(x.k[i] * first);
  }
#pragma unroll
  for (int i = kKdaTokens - 1; i >= 0; --i) {
    s.k_end[WideTile128::at(begin + i, c)] = __float2bfloat16_rn(x.k[i] * rest);
    rest *= x.alpha[i];
  }
  s.decay[tile][c] = first;
}

/// A warp's share of [64, 128] sums: the rows of one tile, 32 columns.
using Sums = float[4][4];

/// Y = dU - N^T B dU; dbeta = <Y, W> by parts; dR = B Y and U = B W replace dU and W.
__device__ void corrections(Shared& s, const Block& b) {
  const int tile = b.warp / 4, begin = b.warp % 4 * 32, row = tile * kKdaTokens + b.lane / 4;
  Sums y;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int column = begin + n * 8 + b.lane % 4 * 2;
    const std::uint32_t top = pair_at(&s.du[ColumnTile::at(row, column)]),
                        bottom = pair_at(&s.du[ColumnTile::at(row + 8, column)]);
    y[n][0] = low_half(top);
    y[n][1] = high_half(top);
    y[n][2] = low_half(bottom);
    y[n][3] = high_half(bottom);
  }
  for (int t = tile; t < kKdaTiles; ++t) {
    std::uint32_t a[4];
    load_a_trans<WideTile64>(a, s.minus_bn, t * kKdaTokens, tile * kKdaTokens, b.lane);
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      std::uint32_t x[4];
      load_b_trans<ColumnTile>(x, s.du, t * kKdaTokens, begin + n * 8, b.lane);
      multiply_16(y[n], y[n + 1], a, x);
    }
  }
  const float beta[2] = {s.beta[row], s.beta[row + 8]};
  float dot[2] = {};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t& w =
          pair_at(&s.w[ColumnTile::at(row + 8 * half, begin + n * 8 + b.lane % 4 * 2)]);
      const float low = low_half(w), high = high_half(w);
      dot[half] += y[n][2 * half] * low + y[n][2 * half + 1] * high;
      w = pack_bf16(beta[half] * low, beta[half] * high);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    dot[half] += __shfl_xor_sync(0xffffffffU, dot[half], 1);
    dot[half] += __shfl_xor_sync(0xffffffffU, dot[half], 2);
    if (b.lane % 4 == 0) s.dbeta[b.warp % 4][row + 8 * half] = dot[half];
  }
  __syncthreads();  // all have read dU
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      pair_at(&s.du[ColumnTile::at(row + 8 * half, begin + n * 8 + b.lane % 4 * 2)]) =
          pack_bf16(beta[half] * y[n][2 * half], beta[half] * y[n][2 * half + 1]);
    }
  }
}

__device__ void store_value_gradients(const Shared& s, const Block& b) {
  store_rows<ColumnTile>(b, static_cast<b16*>(b.out.dv), s.du);
  if (b.thread < b.chunk.tokens) {
    b.out.dbeta[(b.chunk.first + b.thread) * b.in.heads + b.head] =
        s.dbeta[0][b.thread] + s.dbeta[1][b.thread] + s.dbeta[2][b.thread] + s.dbeta[3][b.thread];
  }
}

/// dP = lower(dO U^T), dA = -strictlower(dR U^T), tile by tile.
__device__ void pair_gradients(Shared& s, const Block& b) {
  constexpr int kPairs = kKdaTiles * (kKdaTiles + 1) / 2;
  for (int unit = b.warp; unit < 2 * kPairs; unit += kThreads / kWarp) {
    const int pair = unit / 2;
    const bool queries = unit % 2 == 0;
    const int later = pair < 1   ? 0
                      : pair < 3 ? 1
                      : pair < 6 ? 2
                                 : 3,
              earlier = pair - later * (later + 1) / 2;
    float d[2][4] = {};
#pragma unroll
    for (int v = 0; v < kKdaDim; v += 16) {
      std::uint32_t a[4], u[4];
      if (queries) {
        load_a<WideTile128>(a, s.d_o, later * kKdaTokens, v, b.lane);
      } else {
        load_a<ColumnTile>(a, s.du, later * kKdaTokens, v, b.lane);
      }
      load_b<ColumnTile>(u, s.w, earlier * kKdaTokens, v, b.lane);
      multiply_16(d[0], d[1], a, u);
    }
    const float sign = queries ? 1.0f : -1.0f;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = b.lane / 4 + 8 * half, i = n * 8 + b.lane % 4 * 2;
        const float x = sign * d[n][2 * half], y = sign * d[n][2 * half + 1];
        if (later == earlier) {
          auto& to = queries ? s.dp_tile : s.da_tile;
          *reinterpret_cast<float2*>(&to[later][r][i]) = {x, y};
        } else {
          pair_at((queries ? s.dp : s.da) +
                  WideTile64::at(later * kKdaTokens + r, earlier * kKdaTokens + i)) =
              pack_bf16(x, y);
        }
      }
    }
  }
}

/// Parts of <S, dS'> per key.
__device__ void state_products(Shared& s, const Block& b) {
  const int c = b.thread % 64 * 2, slab = b.thread / 64;
  float2 sum{};
#pragma unroll
  for (int i = 0; i < kKdaDim / kSlabs; ++i) {
    const int at = WideTile128::at(slab * (kKdaDim / kSlabs) + i, c);
    const std::uint32_t x = pair_at(&s.state[at]), y = pair_at(&s.d_state[at]);
    sum.x += low_half(x) * low_half(y);
    sum.y += high_half(x) * high_half(y);
  }
  *reinterpret_cast<float2*>(&s.states[slab][c]) = sum;
}

/// dQh = dO S^T, dKh = -dR S^T, dKb = U dS'^T, and the sums of Kb dKb over the tile.
__device__ void state_part(Shared& s, const Block& b, Sums& dq, Sums& k_row, Sums& k_column) {
  const int tile = b.warp / 4, begin = b.warp % 4 * 32, top = tile * kKdaTokens;
#pragma unroll
  for (int v = 0; v < kKdaDim; v += 16) {
    std::uint32_t d_out[4], dr[4], u[4];
    load_a<WideTile128>(d_out, s.d_o, top, v, b.lane);
    load_a<ColumnTile>(dr, s.du, top, v, b.lane);
    load_a<ColumnTile>(u, s.w, top, v, b.lane);
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      std::uint32_t x[4];
      load_b_trans<WideTile128>(x, s.state, v, begin + n * 8, b.lane);
      multiply_16(dq[n], dq[n + 1], d_out, x);
      multiply_16(k_row[n], k_row[n + 1], dr, x);
      load_b_trans<WideTile128>(x, s.d_state, v, begin + n * 8, b.lane);
      multiply_16(k_column[n], k_column[n + 1], u, x);
    }
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int column = begin + n * 8 + b.lane % 4 * 2, row = top + b.lane / 4;
    const std::uint32_t k0 = pair_at(&s.k_end[WideTile128::at(row, column)]),
                        k1 = pair_at(&s.k_end[WideTile128::at(row + 8, column)]);
    float2 sum{low_half(k0) * k_column[n][0] + low_half(k1) * k_column[n][2],
               high_half(k0) * k_column[n][1] + high_half(k1) * k_column[n][3]};
#pragma unroll
    for (int bit = 4; bit <= 16; bit *= 2) {
      sum.x += __shfl_xor_sync(0xffffffffU, sum.x, bit);
      sum.y += __shfl_xor_sync(0xffffffffU, sum.y, bit);
    }
    for (int t = tile + 1; t < kKdaTiles; ++t) {
      sum.x *= s.decay[t][column];
      sum.y *= s.decay[t][column + 1];
    }
    if (b.lane < 4) *reinterpret_cast<float2*>(&s.ends[tile][column]) = sum;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      k_row[n][i] = -k_row[n][i];
  }
}

__device__ __forceinline__ void decay_columns(Sums& x, const float* decay, int begin, int lane) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float2 d = *reinterpret_cast<const float2*>(decay + begin + n * 8 + lane % 4 * 2);
    x[n][0] *= d.x;
    x[n][1] *= d.y;
    x[n][2] *= d.x;
    x[n][3] *= d.y;
  }
}

/// Adds the products of pairs in different tiles: rows from the first tile on, columns from the last.
__device__ void pair_part(Shared& s, const Block& b, Sums& dq, Sums& k_row, Sums& k_column) {
  const int tile = b.warp / 4, begin = b.warp % 4 * 32, top = tile * kKdaTokens;
  for (int t = 0; t < tile; ++t) {
    decay_columns(dq, s.decay[t], begin, b.lane);
    decay_columns(k_row, s.decay[t], begin, b.lane);
    std::uint32_t p[4], a[4];
    load_a<WideTile64>(p, s.dp, top, t * kKdaTokens, b.lane);
    load_a<WideTile64>(a, s.da, top, t * kKdaTokens, b.lane);
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      std::uint32_t x[4];
      load_b_trans<WideTile128>(x, s.k_end, t * kKdaTokens, begin + n * 8, b.lane);
      multiply_16(dq[n], dq[n + 1], p, x);
      multiply_16(k_row[n], k_row[n + 1], a, x);
    }
  }
  for (int t = kKdaTiles - 1; t > tile; --t) {
    decay_columns(k_column, s.decay[t], begin, b.lane);
    std::uint32_t p[4], a[4];
    load_a_trans<WideTile64>(p, s.dp, t * kKdaTokens, top, b.lane);
    load_a_trans<WideTile64>(a, s.da, t * kKdaTokens, top, b.lane);
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      std::uint32_t x[4];
      load_b_trans<WideTile128>(x, s.q_row, t * kKdaTokens, begin + n * 8, b.lane);
      multiply_16(k_column[n], k_column[n + 1], p, x);
      load_b_trans<WideTile128>(x, s.k_row_scaled, t * kKdaTokens, begin + n * 8, b.lane);
      multiply_16(k_column[n], k_column[n + 1], a, x);
    }
  }
}

__device__ __forceinline__ void put_sums(float* to, const Sums& x, const Block& b) {
  const int row = b.warp / 4 * kKdaTokens + b.lane / 4, begin = b.warp % 4 * 32 + b.lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    *reinterpret_cast<float2*>(to + sum_at(row, begin + n * 8)) = {x[n][0], x[n][1]};
    *reinterpret_cast<float2*>(to + sum_at(row + 8, begin + n * 8)) = {x[n][2], x[n][3]};
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    gradients_kernel(const __grid_constant__ KdaTiledInput in,
                     const __grid_constant__ KdaRecords records,
                     const __grid_constant__ KdaRecords gradients,
                     const __grid_constant__ KdaTiledGradients out) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const std::int64_t slot = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const Block b{in,
                out,
                in.chunks.at(slot),
                in.first_head + static_cast<int>(blockIdx.y),
                thread,
                thread / kWarp,
                thread % kWarp};
  if (b.chunk.tokens <= 0) return;
  load_operands(s, b, records.at(slot, b.head), gradients.at(slot, b.head));
  __syncthreads();
  mbarrier_wait(&s.barrier, 0);
  corrections(s, b);
  __syncthreads();
  store_value_gradients(s, b);
  pair_gradients(s, b);
  state_products(s, b);
  Sums dq = {}, k_row = {}, k_column = {};
  state_part(s, b, dq, k_row, k_column);
  __syncthreads();
  pair_part(s, b, dq, k_row, k_column);
  put_sums(s.dq, dq, b);
  put_sums(s.k_row, k_row, b);
  put_sums(s.k_column, k_column, b);
  __syncthreads();
  finish(s, b);
}

}  // namespace

void kda_tiled_gradients(cudaStream_t stream,
                         const KdaTiledInput& in,
                         const KdaRecords& records,
                         const KdaRecords& gradients,
                         const KdaTiledGradients& out) {
  static_assert(sizeof(Shared) <= 227 * 1024);
  if (in.chunks.num_slots == 0 || in.num_heads == 0) return;
  MOESAIC_CUDA_CALL(cudaFuncSetAttribute(gradients_kernel,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(sizeof(Shared))));
  const dim3 grid(static_cast<unsigned>(in.chunks.num_slots), static_cast<unsigned>(in.num_heads));
  gradients_kernel<<<grid, kThreads, sizeof(Shared), stream>>>(in, records, gradients, out);
  check_launch("kernel kda_chunk_backward: gradients");
}

}  // namespace moesaic::cuda
