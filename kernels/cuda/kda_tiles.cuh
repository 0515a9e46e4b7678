#pragma once
// Tiles of bf16 in shared memory, as the KDA tensor-core kernels lay them out, and their fragments. Rows are cut into
// pieces of 16 bytes, permuted so that eight rows of one column of pieces lie in different banks (what ldmatrix reads).
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/kda_tiled.h"
#include "kernels/cuda/ptx.cuh"

namespace moesaic::cuda {

using b16 = __nv_bfloat16;

/// Element (row, column) of a tile with rows of Width = 64 or 128.
template <int Width>
__device__ __forceinline__ int wide_at(int row, int column) {
  return row * Width + (((column >> 3) ^ (row & 7)) << 3) + (column & 7);
}
/// Of a [64, 128] tile in columns of 16: column by column, each [64, 16], so that a warp's 16 columns are 2 KiB in a row.
__device__ __forceinline__ int column_at(int row, int column) {
  return (column >> 4) * (kKdaChunk * 16) + row * 16 + ((((column >> 3) ^ (row >> 2)) & 1) << 3) +
         (column & 7);
}

struct WideTile128 {
  static __device__ __forceinline__ int at(int row, int column) {
    return wide_at<128>(row, column);
  }
};
struct WideTile64 {
  static __device__ __forceinline__ int at(int row, int column) { return wide_at<64>(row, column); }
};
struct ColumnTile {
  static __device__ __forceinline__ int at(int row, int column) { return column_at(row, column); }
};

// Fragments of the 16 x 16 block at (row, column). "a": as the left operand; "b": as the right one, two n8 halves b[0..1]
// and b[2..3]. The tile holds a[m][k] and b[n][k]; with _trans a[k][m] and b[k][n].
template <class Tile>
__device__ __forceinline__ void load_a(
    std::uint32_t (&a)[4], const b16* tile, int row, int column, int lane) {
  ldmatrix_x4(a, tile + Tile::at(row + (lane & 15), column + ((lane >> 4) << 3)));
}
template <class Tile>
__device__ __forceinline__ void load_a_trans(
    std::uint32_t (&a)[4], const b16* tile, int row, int column, int lane) {
  ldmatrix_x4_trans(a, tile + Tile::at(row + ((lane >> 4) << 3) + (lane & 7), column + (lane & 8)));
}
template <class Tile>
__device__ __forceinline__ void load_b(
    std::uint32_t (&b)[4], const b16* tile, int row, int column, int lane) {
  ldmatrix_x4(b, tile + Tile::at(row + ((lane >> 4) << 3) + (lane & 7), column + (lane & 8)));
}
template <class Tile>
__device__ __forceinline__ void load_b_trans(
    std::uint32_t (&b)[4], const b16* tile, int row, int column, int lane) {
  ldmatrix_x4_trans(b, tile + Tile::at(row + (lane & 15), column + ((lane >> 4) << 3)));
}
/// d0 += a b's first half, d1 += a b's second half.
__device__ __forceinline__ void multiply_16(float (&d0)[4],
                                            float (&d1)[4],
                                            const std::uint32_t (&a)[4],
                                            const std::uint32_t (&b)[4]) {
  const std::uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
  mma_bf16(d0, a, low);
  mma_bf16(d1, a, high);
}
__device__ __forceinline__ float low_half(std::uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float high_half(std::uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000U);
}
__device__ __forceinline__ std::uint32_t& pair_at(b16* element) {
  return *reinterpret_cast<std::uint32_t*>(element);
}
__device__ __forceinline__ std::uint32_t pair_at(const b16* element) {
  return *reinterpret_cast<const std::uint32_t*>(element);
}
__device__ __forceinline__ float rounded(float x) {
  return __bfloat162float(__float2bfloat16_rn(x));
}

/// Of a log decay; see kKdaDecayFloor of the CPU version.
__device__ __forceinline__ float decay_of(float g) {
  return g < -87.0f ? 0.0f : __expf(g);
}

/// Copies `bytes` (a multiple of 16) between shared memory and a record, all threads of the block.
__device__ __forceinline__ void copy_to_record(
    std::byte* to, const void* from, int bytes, int thread, int threads) {
  const auto* source = reinterpret_cast<const uint4*>(from);
  auto* target = reinterpret_cast<uint4*>(to);
  for (int i = thread; i < bytes / 16; i += threads)
    target[i] = source[i];
}

__device__ __forceinline__ bool is_aligned_16(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p) % 16 == 0;
}

/// 16 bytes of a tensor whose base may be odd: `aligned` says that it is not.
__device__ __forceinline__ uint4 load_16(const b16* p, bool aligned) {
  if (aligned) return *reinterpret_cast<const uint4*>(p);
  const auto* half = reinterpret_cast<const std::uint16_t*>(p);
  std::uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    word[i] = half[2 * i] | (static_cast<std::uint32_t>(half[2 * i + 1]) << 16);
  return {word[0], word[1], word[2], word[3]};
}
__device__ __forceinline__ void store_16(b16* p, const uint4& x, bool aligned) {
  if (aligned) {
    *reinterpret_cast<uint4*>(p) = x;
    return;
  }
  auto* half = reinterpret_cast<std::uint16_t*>(p);
  const std::uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    half[2 * i] = static_cast<std::uint16_t>(word[i]);
    half[2 * i + 1] = static_cast<std::uint16_t>(word[i] >> 16);
  }
}

}  // namespace moesaic::cuda
