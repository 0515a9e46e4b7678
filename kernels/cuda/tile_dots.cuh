#pragma once
// Plain products of 64 x 64 tiles for kernels that take any size and type: 256 threads, 4 x 4 results each.
#include "kernels/cuda/device.cuh"

namespace moesaic::cuda {

constexpr int kTile = 64;
constexpr int kTileThreads = 256;
constexpr int kTileSide =
    16;  ///< threads along one side; a thread's results are 16 rows (columns) apart
constexpr int kTilePer = kTile / kTileSide;

template <class A>
struct TileMemory {
  A x[kTileSide][kTile + 1];
  A y[kTileSide][kTile + 1];
};

__device__ __forceinline__ int tile_row(int i) {
  return static_cast<int>(threadIdx.x) / kTileSide + kTileSide * i;
}
__device__ __forceinline__ int tile_column(int j) {
  return static_cast<int>(threadIdx.x) % kTileSide + kTileSide * j;
}

/// acc[i][j] += sum over c < depth of x(tile_row(i), c) y(tile_column(j), c), c ascending: a result's bits do not depend
/// on where in the tile it stands. x and y are called with rows of the tile, 0 … 63, and return an A; outside of the
/// data they must return 0. All threads of the block call it.
template <class A, class X, class Y>
__device__ void tile_dots(
    A (&acc)[kTilePer][kTilePer], int depth, const X& x, const Y& y, TileMemory<A>& memory) {
  const int c = static_cast<int>(threadIdx.x) % kTileSide,
            r = static_cast<int>(threadIdx.x) / kTileSide;
  for (int begin = 0; begin < depth; begin += kTileSide) {
    const bool inside = begin + c < depth;
#pragma unroll
    for (int p = 0; p < kTilePer; ++p) {
      memory.x[c][r + kTileSide * p] = inside ? x(r + kTileSide * p, begin + c) : A(0);
      memory.y[c][r + kTileSide * p] = inside ? y(r + kTileSide * p, begin + c) : A(0);
    }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kTileSide; ++step) {
      A a[kTilePer], b[kTilePer];
#pragma unroll
      for (int i = 0; i < kTilePer; ++i) {
        a[i] = memory.x[step][tile_row(i)];
        b[i] = memory.y[step][tile_column(i)];
      }
#pragma unroll
      for (int i = 0; i < kTilePer; ++i)
#pragma unroll
        for (int j = 0; j < kTilePer; ++j)
          acc[i][j] += a[i] * b[j];
    }
    __syncthreads();
  }
}

}  // namespace moesaic::cuda
