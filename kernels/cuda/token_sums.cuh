#pragma once
// Second stage of sums over tokens: blocks of a first kernel wrote partial sums, one row each.
#include "kernels/cuda/launch.h"

namespace moesaic::cuda {

constexpr int kTokenSumColumns = 32;
constexpr int kTokenSumLanes = 16;

// Lane y takes every kTokenSumLanes-th row, then the lanes are added in order.
template <class A>
__global__ void __launch_bounds__(kTokenSumColumns* kTokenSumLanes)
    add_token_sums_kernel(A* out, const A* partials, std::int64_t rows, std::int64_t columns) {
  __shared__ A lanes[kTokenSumLanes][kTokenSumColumns];
  const std::int64_t c = std::int64_t{blockIdx.x} * kTokenSumColumns + threadIdx.x;
  A sum = 0;
  if (c < columns) {
#pragma unroll 4
    for (std::int64_t r = threadIdx.y; r < rows; r += kTokenSumLanes)
      sum += partials[r * columns + c];
  }
  lanes[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || c >= columns) return;
#pragma unroll
  for (int y = 1; y < kTokenSumLanes; ++y)
    sum += lanes[y][threadIdx.x];
  out[c] += sum;
}

/// out[c] += sum over r of partials[r, c], in an order that depends on `rows` only.
template <class A>
void add_token_sums(
    cudaStream_t stream, A* out, const A* partials, std::int64_t rows, std::int64_t columns) {
  add_token_sums_kernel<A>
      <<<static_cast<unsigned>((columns + kTokenSumColumns - 1) / kTokenSumColumns),
         dim3(kTokenSumColumns, kTokenSumLanes),
         0,
         stream>>>(out, partials, rows, columns);
  check_launch("kernel add_token_sums");
}

}  // namespace moesaic::cuda
