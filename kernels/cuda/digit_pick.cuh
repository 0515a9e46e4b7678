#pragma once
// A step of a radix selection, for blocks of 256 threads.
#include "kernels/cuda/device.cuh"

namespace moesaic::cuda {

constexpr int kPickDigits = 256;  ///< digits, and threads of the block

struct DigitPick {
  int digit;  ///< of the k-th largest number
  int above;  ///< numbers with a larger digit
};

/// Thread d has the count of the numbers with digit d; 1 <= k <= the sum of all counts. All threads
/// of the block must call it, and get the same answer.
__device__ inline DigitPick pick_digit(int own, int k) {
  __shared__ int from_here[kPickDigits];  // numbers with this digit or a larger one
  __shared__ DigitPick found;
  const int d = static_cast<int>(threadIdx.x);
  from_here[d] = own;
  __syncthreads();
#pragma unroll
  for (int offset = 1; offset < kPickDigits; offset *= 2) {
    const int more = d + offset < kPickDigits ? from_here[d + offset] : 0;
    __syncthreads();
    from_here[d] += more;
    __syncthreads();
  }
  const int above = from_here[d] - own;
  if (above < k && k <= from_here[d]) found = {d, above};  // one thread
  __syncthreads();
  const DigitPick result = found;
  __syncthreads();  // the next call writes again
  return result;
}

}  // namespace moesaic::cuda
