#pragma once
// Parts of the scans (kda_tiled_scan.cu): the ring of stages that the operands come through, states and columns of tokens in
// the accumulators of a warp, and their products.
#include "kernels/cuda/kda_tiles.cuh"

namespace moesaic::cuda::kda_scan {

constexpr int kStages = 3;
constexpr int kColumnBytes = kKdaChunk * 16 * 2;  // 16 value channels of a chunk's tokens
constexpr int kStateBytes = 16 * kKdaDim * 2;     // 16 value channels of a state
constexpr int kMaxWarps = 4;
constexpr int kShared = KdaRecord::kW;  // operands that all warps read

/// Shared memory: stages of [operands | columns of each warp], then a state and (forward) columns of output per warp.
struct Layout {
  int warps;
  __host__ __device__ constexpr int stage_bytes() const { return kShared + warps * kColumnBytes; }
  __host__ __device__ constexpr int warp_bytes() const { return kStateBytes + kColumnBytes; }
  __host__ __device__ constexpr int total() const {
    return kStages * stage_bytes() + warps * warp_bytes();
  }
};

/// A warp's place: document, head and 16 value channels from `value` on.
struct Place {
  std::int64_t document;
  int head, value;
};

/// What a scan does around its products: the ring of stages and this warp's memory.
struct Ring {
  unsigned char* memory;
  std::uint64_t* barriers;
  Layout layout;
  int warp, lane;

  __device__ unsigned char* stage(int i) const {
    return memory + i % kStages * layout.stage_bytes();
  }
  __device__ const b16* tile(int i, int offset) const {
    return reinterpret_cast<const b16*>(stage(i) + offset);
  }
  __device__ const float* numbers(int i, int offset) const {
    return reinterpret_cast<const float*>(stage(i) + offset);
  }
  __device__ b16* columns(int i) const {
    return reinterpret_cast<b16*>(stage(i) + kShared + warp * kColumnBytes);
  }
  __device__ b16* state() const {
    return reinterpret_cast<b16*>(memory + kStages * layout.stage_bytes() +
                                  warp * layout.warp_bytes());
  }
  __device__ b16* output() const { return state() + kStateBytes / 2; }
  /// Starts the copy of step i's operands, with `columns` bytes of the warps' columns from `w` on.
  __device__ void load(int i, const std::byte* record, const std::byte* w, int columns) const {
    std::uint64_t* barrier = &barriers[i % kStages];
    fence_proxy_async();
    mbarrier_arrive_expect(barrier, static_cast<std::uint32_t>(kShared + columns));
    bulk_load(stage(i), record, kShared, barrier);
    if (columns > 0) bulk_load(stage(i) + kShared, w, static_cast<std::uint32_t>(columns), barrier);
  }
  __device__ void wait(int i) const {
    mbarrier_wait(&barriers[i % kStages], static_cast<std::uint32_t>(i / kStages % 2));
  }
};

using Accumulator = float[kKdaDim / 8][4];  // [16 values, 128 keys]
using Columns = float[kKdaChunk / 8][4];    // [16 values, 64 tokens]

__device__ __forceinline__ void load_state(Accumulator& s, const float* from, int value, int lane) {
#pragma unroll
  for (int n = 0; n < kKdaDim / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = n * 8 + lane % 4 * 2 + i % 2, v = value + lane / 4 + i / 2 * 8;
      s[n][i] = from == nullptr ? 0.0f : from[key * kKdaDim + v];
    }
  }
}
__device__ __forceinline__ void store_state(const Accumulator& s, float* to, int value, int lane) {
  if (to == nullptr) return;
#pragma unroll
  for (int n = 0; n < kKdaDim / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      to[(n * 8 + lane % 4 * 2 + i % 2) * kKdaDim + value + lane / 4 + i / 2 * 8] = s[n][i];
  }
}

/// Accumulators of two neighbouring n8 tiles as a left operand.
__device__ __forceinline__ void as_operand(std::uint32_t (&a)[4],
                                           const float (&left)[4],
                                           const float (&right)[4]) {
  a[0] = pack_bf16(left[0], left[1]);
  a[1] = pack_bf16(left[2], left[3]);
  a[2] = pack_bf16(right[0], right[1]);
  a[3] = pack_bf16(right[2], right[3]);
}
/// The state, rounded: left operands by 16 keys.
__device__ __forceinline__ void round_state(std::uint32_t (&a)[kKdaDim / 16][4],
                                            const Accumulator& s) {
#pragma unroll
  for (int k = 0; k < kKdaDim / 16; ++k)
    as_operand(a[k], s[2 * k], s[2 * k + 1]);
}
/// Writes a rounded state to the record in bulk. The buffer may be written again after bulk_wait_read().
__device__ __forceinline__ void keep_state(const std::uint32_t (&a)[kKdaDim / 16][4],
                                           b16* buffer,
                                           std::byte* record,
                                           int value,
                                           int lane) {
#pragma unroll
  for (int k = 0; k < kKdaDim / 16; ++k)
    stmatrix_x4(buffer + WideTile128::at(lane & 15, k * 16 + ((lane >> 4) << 3)), a[k]);
  fence_proxy_async();
  __syncwarp();
  if (lane == 0) bulk_store(record + value * kKdaDim * 2, buffer, kStateBytes);
}
/// [16 values, 16 tokens] from or to rows of tokens.
__device__ __forceinline__ b16* column_piece(b16* columns, int token, int lane) {
  return columns + ColumnTile::at(token + ((lane >> 4) << 3) + (lane & 7), lane & 8);
}
/// Columns, rounded, to `buffer` as rows of tokens.
__device__ __forceinline__ void put_columns(b16* buffer, const Columns& x, int lane) {
#pragma unroll
  for (int k = 0; k < kKdaChunk / 16; ++k) {
    std::uint32_t a[4];
    as_operand(a, x[2 * k], x[2 * k + 1]);
    stmatrix_x4_trans(column_piece(buffer, k * 16, lane), a);
  }
}
/// In bulk to a record's columns.
__device__ __forceinline__ void keep_columns(b16* buffer, std::byte* record, int value, int lane) {
  fence_proxy_async();
  __syncwarp();
  if (lane == 0) bulk_store(record + value / 16 * kColumnBytes, buffer, kColumnBytes);
}
/// Left operands diag(beta) x by 16 tokens.
__device__ __forceinline__ void scale_by_beta(std::uint32_t (&a)[kKdaChunk / 16][4],
                                              const Columns& x,
                                              const float* beta,
                                              int lane) {
#pragma unroll
  for (int k = 0; k < kKdaChunk / 16; ++k) {
    const float2 left = *reinterpret_cast<const float2*>(beta + k * 16 + lane % 4 * 2),
                 right = *reinterpret_cast<const float2*>(beta + k * 16 + 8 + lane % 4 * 2);
    a[k][0] = pack_bf16(x[2 * k][0] * left.x, x[2 * k][1] * left.y);
    a[k][1] = pack_bf16(x[2 * k][2] * left.x, x[2 * k][3] * left.y);
    a[k][2] = pack_bf16(x[2 * k + 1][0] * right.x, x[2 * k + 1][1] * right.y);
    a[k][3] = pack_bf16(x[2 * k + 1][2] * right.x, x[2 * k + 1][3] * right.y);
  }
}
__device__ __forceinline__ void decay_state(Accumulator& s, const float* decay, int lane) {
#pragma unroll
  for (int n = 0; n < kKdaDim / 8; ++n) {
    const float2 d = *reinterpret_cast<const float2*>(decay + n * 8 + lane % 4 * 2);
    s[n][0] *= d.x;
    s[n][1] *= d.y;
    s[n][2] *= d.x;
    s[n][3] *= d.y;
  }
}
/// x += state rows^T, rows [64 tokens, 128 keys].
__device__ __forceinline__ void add_state_times_rows(Columns& x,
                                                     const std::uint32_t (&state)[kKdaDim / 16][4],
                                                     const b16* rows,
                                                     int lane) {
#pragma unroll
  for (int k = 0; k < kKdaDim / 16; ++k) {
#pragma unroll
    for (int n = 0; n < kKdaChunk / 16; ++n) {
      std::uint32_t b[4];
      load_b<WideTile128>(b, rows, n * 16, k * 16, lane);
      multiply_16(x[2 * n], x[2 * n + 1], state[k], b);
    }
  }
}
/// s += columns rows.
__device__ __forceinline__ void add_columns_times_rows(
    Accumulator& s, const std::uint32_t (&columns)[kKdaChunk / 16][4], const b16* rows, int lane) {
#pragma unroll
  for (int k = 0; k < kKdaChunk / 16; ++k) {
#pragma unroll
    for (int n = 0; n < kKdaDim / 16; ++n) {
      std::uint32_t b[4];
      load_b_trans<WideTile128>(b, rows, k * 16, n * 16, lane);
      multiply_16(s[2 * n], s[2 * n + 1], columns[k], b);
    }
  }
}

__device__ __forceinline__ void store_output(
    const b16* columns, b16* o, std::int64_t stride, int tokens, bool aligned, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int piece = lane + i * kWarp, row = piece / 2, column = piece % 2 * 8;
    if (row < tokens)
      store_16(o + row * stride + column,
               *reinterpret_cast<const uint4*>(columns + ColumnTile::at(row, column)),
               aligned);
  }
}

}  // namespace moesaic::cuda::kda_scan
