// Norms of gradients, in f64: one partial sum per 4096 elements, then a block per sum adds its partials; orders are fixed.
#include "kernels/cuda/map.cuh"
#include "kernels/cuda/split_master.cuh"
#include "kernels/ops/clip.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr std::int64_t kBlock = 4096;  // elements per partial sum; part of the bits
constexpr int kThreads = 256;
constexpr int kManyThreads = 1024;

std::int64_t blocks_per_sum(const SumOfSquares& op) {
  return (op.x.numel() / op.sums() + kBlock - 1) / kBlock;
}

template <class T>
__device__ __forceinline__ double square(T x) {
  const double v = widen<double>(x);
  return v * v;
}

// Thread i adds elements i N, i N + 1, …, then those kThreads N further; the threads are added as row_sum does.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) block_sums_kernel(double* __restrict__ sums,
                                                              const T* __restrict__ x,
                                                              std::int64_t size,
                                                              std::int64_t blocks,
                                                              std::int64_t total_blocks) {
  constexpr int kSteps = static_cast<int>(kBlock) / (kThreads * N);
  for (std::int64_t b = blockIdx.x; b < total_blocks; b += gridDim.x) {
    const std::int64_t begin = b % blocks * kBlock, count = min(kBlock, size - begin);
    const T* v = x + b / blocks * size + begin;
    double sum = 0;
    if (count == kBlock) {
      Vec<T, N> loaded[kSteps];
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
        loaded[s] = load<N>(v + (s * kThreads + static_cast<int>(threadIdx.x)) * N);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int i = 0; i < N; ++i)
          sum += square(loaded[s].v[i]);
      }
    } else {
      for (std::int64_t c = std::int64_t{threadIdx.x} * N; c < count; c += kThreads * N) {
        for (int i = 0; i < N && c + i < count; ++i)
          sum += square(v[c + i]);
      }
    }
    sum = row_sum<kThreads>(sum);
    if (threadIdx.x == 0) sums[b] = sum;
  }
}

// One block per sum; also for sums over nothing. `index` may be null.
__global__ void __launch_bounds__(kThreads) finish_kernel(double* partials,
                                                          const double* sums,
                                                          const std::int32_t* index,
                                                          std::int64_t n,
                                                          std::int64_t blocks) {
  for (std::int64_t i = blockIdx.x; i < n; i += gridDim.x) {
    double sum = 0;
    for (std::int64_t b = threadIdx.x; b < blocks; b += kThreads)
      sum += sums[i * blocks + b];
    sum = row_sum<kThreads>(sum);
    if (threadIdx.x == 0) partials[index == nullptr ? i : index[i]] = sum;
  }
}

template <class A>
__global__ void __launch_bounds__(kManyThreads) clip_factor_kernel(
    A* scalars, double* norm_out, const double* partials, std::int64_t n, double limit) {
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < n; i += kManyThreads)
    sum += partials[i];
  sum = row_sum<kManyThreads>(sum);
  if (threadIdx.x != 0) return;
  const double norm = sqrt(sum);
  *norm_out = norm;
  A& factor = scalars[index_of(StepScalar::clip_factor)];
  if (!isfinite(norm)) {
    factor = 0;
    scalars[index_of(StepScalar::skip)] = 1;
    return;
  }
  factor = limit == 0 ? A(1) : static_cast<A>(min(1.0, limit / (norm + 1e-6)));
}

// The weights that are averaged: whole, or split.
template <class A>
struct WholeWeights {
  const A* w;
  template <int N>
  __device__ __forceinline__ Vec<A, N> at(std::int64_t i) const {
    return load<N>(w + i);
  }
};
struct SplitWeights {
  const __nv_bfloat16* weight;
  const std::uint16_t* remainder;
  template <int N>
  __device__ __forceinline__ Vec<float, N> at(std::int64_t i) const {
    return load_joined<N>(weight + i, remainder + i);
  }
};

// The fused multiply-add is written out: both get the same bits.
template <class A, class Weights>
struct AverageAt {
  A* average;
  Weights w;
  const A* scalars;
  A keep, take;
  template <int N>
  __device__ __forceinline__ void at(std::int64_t i) const {
    if (scalars != nullptr && scalars[index_of(StepScalar::skip)] != A(0)) return;
    auto v = load<N>(average + i);
    const auto x = w.template at<N>(i);
#pragma unroll
    for (int j = 0; j < N; ++j)
      v.v[j] = fma(take, x.v[j], keep * v.v[j]);
    store<N>(average + i, v);
  }
};

// Calls f(TypeTag<A>) for A = double or float; check() has refused others.
template <class F>
void dispatch_stats(DType dtype, F&& f) {
  if (dtype == DType::f64) return f(TypeTag<double>{});
  f(TypeTag<float>{});
}

}  // namespace

void launch(CudaContext& context, const SumOfSquares& op) {
  const Arena::Mark mark(context.scratch);
  const std::int64_t n = op.sums(), size = op.x.numel() / n, blocks = blocks_per_sum(op);
  const TensorView sums = context.scratch.take(
      {std::max<std::int64_t>(1, n * blocks)}, DType::f64, "sum_of_squares.blocks");
  if (is_dry(context)) return;
  const auto stream = native_stream(context);
  if (blocks > 0) {
    dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
      with_vector<kWide<T>>(size, {op.x.data()}, [&]<int N>(std::integral_constant<int, N>) {
        block_sums_kernel<device_t<T>, N><<<grid_for(context, n * blocks), kThreads, 0, stream>>>(
            sums.as<double>(), device_data<T>(op.x), size, blocks, n * blocks);
      });
    });
    check_launch("kernel sum_of_squares");
  }
  finish_kernel<<<grid_for(context, n), kThreads, 0, stream>>>(
      op.partials.as<double>(),
      sums.as<double>(),
      op.index.empty() ? nullptr : op.index.as<std::int32_t>(),
      n,
      blocks);
  check_launch("kernel sum_of_squares: finish");
}

void launch(CudaContext& context, const ClipFactor& op) {
  if (is_dry(context)) return;
  dispatch_stats(op.scalars.dtype(), [&]<class A>(TypeTag<A>) {
    clip_factor_kernel<<<1, kManyThreads, 0, native_stream(context)>>>(op.scalars.as<A>(),
                                                                       op.norm.as<double>(),
                                                                       op.partials.as<double>(),
                                                                       op.partials.numel(),
                                                                       op.limit);
  });
  check_launch("kernel clip_factor");
}

void launch(CudaContext& context, const MovingAverage& op) {
  if (is_dry(context) || op.w.numel() == 0) return;
  const auto average = [&]<class A, class Weights>(TypeTag<A>, const Weights& weights) {
    map<kWide<A>>(context,
                  "kernel moving_average",
                  op.w.numel(),
                  {op.average.data(), op.w.data(), op.remainder.data()},
                  AverageAt<A, Weights>{op.average.as<A>(),
                                        weights,
                                        op.scalars.as<A>(),
                                        static_cast<A>(op.decay),
                                        static_cast<A>(1.0 - op.decay)});
  };
  if (!op.remainder.empty()) {
    return average(TypeTag<float>{},
                   SplitWeights{device_data<bf16>(op.w), op.remainder.as<std::uint16_t>()});
  }
  dispatch_stats(op.w.dtype(),
                 [&]<class A>(TypeTag<A> type) { average(type, WholeWeights<A>{op.w.as<A>()}); });
}

}  // namespace moesaic
