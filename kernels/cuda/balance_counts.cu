// Balancing rules that need the counts of a step only. Sums and comparisons are made in integers.
#include <cstdint>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/scalar.cuh"
#include "kernels/ops/balance.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 256;
constexpr int kOneBlock = 512;  // threads of kernels of one block

// The sum of all counts, in all threads of the one block of kOneBlock.
template <class I>
__device__ std::int64_t sum_of(const I* counts, std::int64_t experts) {
  std::int64_t sum = 0;
  for (std::int64_t e = threadIdx.x; e < experts; e += kOneBlock)
    sum += counts[e];
  return row_sum<kOneBlock>(sum);
}

template <class A, class I>
__global__ void __launch_bounds__(kOneBlock)
    sign_kernel(A* bias, const I* counts, Scalar skip, std::int64_t experts, double gamma) {
  if (skip.is_set()) return;
  const std::int64_t sum = sum_of(counts, experts);
  for (std::int64_t e = threadIdx.x; e < experts; e += kOneBlock) {
    const std::int64_t below = sum - experts * static_cast<std::int64_t>(counts[e]);
    if (below != 0) bias[e] += static_cast<A>(below > 0 ? gamma : -gamma);
  }
}

template <class A, class I>
__global__ void __launch_bounds__(kOneBlock)
    frequency_kernel(A* frequency, const I* counts, Scalar skip, std::int64_t experts) {
  if (skip.is_set()) return;
  const std::int64_t sum = sum_of(counts, experts);
  for (std::int64_t e = threadIdx.x; e < experts; e += kOneBlock) {
    frequency[e] =
        static_cast<A>(sum == 0 ? 1.0 / static_cast<double>(experts)
                                : static_cast<double>(counts[e]) / static_cast<double>(sum));
  }
}

template <class I>
__global__ void __launch_bounds__(kThreads)
    accumulate_kernel(std::int64_t* total, const I* counts, std::int64_t experts) {
  const std::int64_t e = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (e < experts) total[e] += counts[e];
}

template <class F>
void dispatch_stats(DType dtype, F&& f) {
  if (dtype == DType::f64) return f(TypeTag<double>{});
  f(TypeTag<float>{});
}
template <class F>
void dispatch_counts(DType dtype, F&& f) {
  if (dtype == DType::i64) return f(TypeTag<std::int64_t>{});
  f(TypeTag<std::int32_t>{});
}
}  // namespace

void launch(CudaContext& context, const BalanceBiasSign& op) {
  if (is_dry(context)) return;
  dispatch_stats(op.bias.dtype(), [&]<class A>(TypeTag<A>) {
    dispatch_counts(op.counts.dtype(), [&]<class I>(TypeTag<I>) {
      sign_kernel<A, I><<<1, kOneBlock, 0, native_stream(context)>>>(
          op.bias.as<A>(), op.counts.as<I>(), Scalar(op.skip), op.bias.dim(0), op.gamma);
      check_launch("kernel balance_bias_sign");
    });
  });
}

void launch(CudaContext& context, const AccumulateCounts& op) {
  const std::int64_t experts = op.total.dim(0);
  if (is_dry(context) || experts == 0) return;
  dispatch_counts(op.counts.dtype(), [&]<class I>(TypeTag<I>) {
    accumulate_kernel<I>
        <<<static_cast<unsigned>((experts + kThreads - 1) / kThreads),
           kThreads,
           0,
           native_stream(context)>>>(op.total.as<std::int64_t>(), op.counts.as<I>(), experts);
    check_launch("kernel accumulate_counts");
  });
}

void launch(CudaContext& context, const BalanceFrequency& op) {
  if (is_dry(context)) return;
  dispatch_stats(op.frequency.dtype(), [&]<class A>(TypeTag<A>) {
    dispatch_counts(op.counts.dtype(), [&]<class I>(TypeTag<I>) {
      frequency_kernel<A, I><<<1, kOneBlock, 0, native_stream(context)>>>(
          op.frequency.as<A>(), op.counts.as<I>(), Scalar(op.skip), op.frequency.dim(0));
      check_launch("kernel balance_frequency");
    });
  });
}

}  // namespace moesaic
