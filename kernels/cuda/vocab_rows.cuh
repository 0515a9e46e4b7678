#pragma once
// What the losses over the vocabulary share: one block per row. Sums over a row run in an order
// that depends on its length and alignment alone, sums over rows in row order.
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"

namespace moesaic::cuda {

constexpr int kFewThreads = 128;
constexpr int kManyThreads = 512;
constexpr std::int64_t kLongRow = 4096;
constexpr int kSumThreads = 256;  // of a block that adds the results of rows
// Blocks that a multiprocessor holds at least: the registers are shared out by it.
template <class A, int Threads>
constexpr int kResident = (sizeof(A) == 8 ? 512 : 1024) / Threads;

// e^x. f32: by the device's power of two, relative error below 2^-20 for the x of a sum that matter;
// numbers below the smallest normal one are 0.
__device__ __forceinline__ double exponential(double x) {
  return ::exp(x);
}
__device__ __forceinline__ float exponential(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504F));
  return y;
}

// A sum of exponentials relative to the largest argument so far. NaN is in the sum, not in the
// maximum.
template <class A>
struct ExpSum {
  A largest = -INFINITY;
  A sum = 0;

  __device__ A reference() const { return largest == A(-INFINITY) ? A(0) : largest; }
  __device__ void rescale(A to) {
    if (!(to > largest)) return;
    sum *= exponential(largest - to);  // 0 at the first number: largest is -infinity
    largest = to;
  }
  template <int N, class T>
  __device__ void add(const Vec<T, N>& x) {
    A top = widen<A>(x.v[0]);
#pragma unroll
    for (int i = 1; i < N; ++i)
      top = widen<A>(x.v[i]) > top ? widen<A>(x.v[i]) : top;
    rescale(top);
    const A from = reference();
#pragma unroll
    for (int i = 0; i < N; ++i)
      sum += exponential(widen<A>(x.v[i]) - from);
  }
  __device__ void merge(A other_largest, A other_sum) {
    rescale(other_largest);
    if (other_largest < largest) other_sum *= exponential(other_largest - largest);
    sum += other_sum;
  }
  // Merges all threads of the block, in a fixed order; the same result in all of them.
  template <int Threads>
  __device__ void merge_block() {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const A other_largest = __shfl_down_sync(0xffffffffU, largest, offset),
              other_sum = __shfl_down_sync(0xffffffffU, sum, offset);
      merge(other_largest, other_sum);
    }
    constexpr int kWarps = Threads / kWarp;
    __shared__ A warps[kWarps][2];
    if (threadIdx.x % kWarp == 0) {
      warps[threadIdx.x / kWarp][0] = largest;
      warps[threadIdx.x / kWarp][1] = sum;
    }
    __syncthreads();
    largest = warps[0][0];
    sum = warps[0][1];
    for (int i = 1; i < kWarps; ++i)
      merge(warps[i][0], warps[i][1]);
    __syncthreads();  // the next row writes warps again
  }
  // The log-sum-exp. As the CPU has it, a row of nothing but -infinity has none.
  __device__ A log() const {
    return largest == A(-INFINITY) ? A(NAN) : largest + ::log(sum);
  }
};

// Calls f(v, the N elements from v on) for a thread's share of the elements [first, n) of a row, in
// ascending order; `first` is a multiple of Threads * N. A batch is loaded before f sees any of it,
// so f may overwrite what it is given.
template <int N, int Threads, class T, class F>
__device__ __forceinline__ void for_row(const T* x, std::int64_t first, std::int64_t n, F&& f) {
  constexpr int kBatch = 4;
  constexpr std::int64_t kStep = Threads * N;
  std::int64_t v = first + std::int64_t{threadIdx.x} * N;
  for (; v + (kBatch - 1) * kStep < n; v += kBatch * kStep) {
    Vec<T, N> batch[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      batch[b] = load<N>(x + v + b * kStep);
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      f(v + b * kStep, batch[b]);
  }
  for (; v < n; v += kStep)
    f(v, load<N>(x + v));
}

template <class A, int N, int Threads, class T>
__device__ A log_sum_exp(const T* x, std::int64_t n) {
  ExpSum<A> total;
  for_row<N, Threads>(x, 0, n, [&](std::int64_t, const Vec<T, N>& xv) { total.add(xv); });
  total.template merge_block<Threads>();
  return total.log();
}

template <int N, int Threads, class D>
__device__ void zero_row(D* d, std::int64_t n) {
  for (std::int64_t v = std::int64_t{threadIdx.x} * N; v < n; v += Threads * N)
    store<N>(d + v, Vec<D, N>{});
}

template <class A>
struct Gradient {
  const A* divisor;  // null without a gradient
  double grad_scale;
  __device__ A factor() const {
    return divisor == nullptr ? A(0) : static_cast<A>(grad_scale / static_cast<double>(*divisor));
  }
};

// sums[blockIdx.x] += the rows' results in row order, in double. One thread adds what the block has
// fetched.
template <class A>
__global__ void __launch_bounds__(kSumThreads) sum_rows_kernel(
    A* first_sum, const A* first, A* second_sum, const A* second, std::int64_t rows) {
  __shared__ double fetched[kSumThreads];
  const A* from = blockIdx.x == 0 ? first : second;
  A* to = blockIdx.x == 0 ? first_sum : second_sum;
  double total = 0;
  for (std::int64_t begin = 0; begin < rows; begin += kSumThreads) {
    const std::int64_t r = begin + threadIdx.x;
    fetched[threadIdx.x] = r < rows ? static_cast<double>(from[r]) : 0.0;
    __syncthreads();
    if (threadIdx.x == 0) {
      const int count = static_cast<int>(min(std::int64_t{kSumThreads}, rows - begin));
#pragma unroll 8
      for (int i = 0; i < count; ++i)
        total += fetched[i];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) *to = static_cast<A>(static_cast<double>(*to) + total);
}

// The types of logits and dlogits: equal, or f32 and bf16.
template <class F>
void dispatch_logits(const ConstTensorView& logits, const ConstTensorView& dlogits, F&& f) {
  const DType gradient = dlogits.empty() ? logits.dtype() : dlogits.dtype();
  dispatch_float(logits.dtype(), [&]<class T>(TypeTag<T> tag) {
    if constexpr (std::is_same_v<T, float>) {
      if (gradient == DType::bf16) return f(tag, TypeTag<bf16>{});
    }
    f(tag, tag);
  });
}

// Calls f with the elements per access and the threads of a block, both by the row's length and
// the alignment.
template <class T, class F>
void with_shape(std::int64_t n, std::initializer_list<const void*> rows, F&& f) {
  constexpr int kWide = 16 / sizeof(T);
  bool wide = n % kWide == 0;
  for (const void* p : rows)
    wide = wide && is_aligned(p, 16);
  const auto with_threads = [&](auto width) {
    if (n >= kLongRow) return f(width, std::integral_constant<int, kManyThreads>{});
    f(width, std::integral_constant<int, kFewThreads>{});
  };
  if (wide) return with_threads(std::integral_constant<int, kWide>{});
  with_threads(std::integral_constant<int, 1>{});
}

template <class A>
void sum_rows(CudaContext& context,
              const TensorView& first_sum,
              const TensorView& first,
              const TensorView& second_sum,
              const TensorView& second) {
  sum_rows_kernel<A><<<second_sum.empty() ? 1 : 2, kSumThreads, 0, native_stream(context)>>>(
      first_sum.as<A>(), first.as<A>(), second_sum.as<A>(), second.as<A>(), first.dim(0));
  check_launch("kernel vocab_loss: sums over rows");
}

}  // namespace moesaic::cuda
