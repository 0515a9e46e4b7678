// Balancing rules. Counts are integers, so their order does not show; what becomes a bias is formed
// with the operations of the CPU, in its order, so that all backends choose the same experts.
#include <cstdint>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/digit_pick.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/order_key.cuh"
#include "kernels/cuda/scalar.cuh"
#include "kernels/ops/balance.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 256;
constexpr int kColumns = 8;  // experts of a block that counts: 32 bytes of each row of f32
constexpr int kRows = kThreads / kColumns;
constexpr std::int64_t kTokensPerBlock = 2048;
constexpr std::int64_t kSharedCounts = 10240;  // that a block may hold
constexpr int kOneBlock = 512;                 // threads of kernels of one block

// Bins of the required bias: low = min - 1, width = (max - min + 2) / bins, formed in f64.
struct Bins {
  double low, width;
};
// All threads of the block must call it.
template <class A>
__device__ Bins bins_of(const A* bias, std::int64_t experts, std::int64_t bins) {
  __shared__ A extremes[2][kOneBlock / kWarp];
  A smallest = bias[0], largest = bias[0];
  for (std::int64_t e = threadIdx.x; e < experts; e += blockDim.x) {
    smallest = bias[e] < smallest ? bias[e] : smallest;
    largest = bias[e] > largest ? bias[e] : largest;
  }
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const A s = __shfl_xor_sync(0xffffffffU, smallest, offset),
            l = __shfl_xor_sync(0xffffffffU, largest, offset);
    smallest = s < smallest ? s : smallest;
    largest = l > largest ? l : largest;
  }
  if (threadIdx.x % kWarp == 0) {
    extremes[0][threadIdx.x / kWarp] = smallest;
    extremes[1][threadIdx.x / kWarp] = largest;
  }
  __syncthreads();
  for (unsigned w = 0; w < blockDim.x / kWarp; ++w) {
    smallest = extremes[0][w] < smallest ? extremes[0][w] : smallest;
    largest = extremes[1][w] > largest ? extremes[1][w] : largest;
  }
  __syncthreads();
  const double low = static_cast<double>(smallest) - 1.0;
  return {low, (static_cast<double>(largest) + 1.0 - low) / static_cast<double>(bins)};
}

// A block counts kColumns experts over kTokensPerBlock tokens, in shared memory where that has
// room.
template <class A, bool Shared>
__global__ void __launch_bounds__(kThreads) histogram_kernel(std::int32_t* histogram,
                                                             const A* scores,
                                                             const A* cutoff,
                                                             const A* bias,
                                                             std::int64_t tokens,
                                                             std::int64_t experts,
                                                             std::int64_t bins) {
  extern __shared__ std::int32_t counts[];  // [kColumns, bins]
  const Bins b = bins_of(bias, experts, bins);
  const A low = static_cast<A>(b.low), per_width = static_cast<A>(1.0 / b.width),
          last = static_cast<A>(bins - 1);
  const std::int64_t first = std::int64_t{blockIdx.x} * kColumns;
  const int column = static_cast<int>(threadIdx.x) % kColumns;
  const std::int64_t expert = first + column;
  std::int32_t* to = Shared ? counts + column * bins : histogram + expert * bins;
  if constexpr (Shared) {
    for (std::int64_t i = threadIdx.x; i < kColumns * bins; i += kThreads)
      counts[i] = 0;
    __syncthreads();
  }
  const std::int64_t begin = std::int64_t{blockIdx.y} * kTokensPerBlock;
  const std::int64_t end = min(tokens, begin + kTokensPerBlock);
  if (expert < experts) {
#pragma unroll 4
    for (std::int64_t t = begin + threadIdx.x / kColumns; t < end; t += kRows) {
      // Cut to the bins before the conversion, which then is a floor; NaN goes to bin 0.
      const A m = (cutoff[t] - scores[t * experts + expert] - low) * per_width;
      const A at_most = m < last ? m : last;
      atomicAdd(&to[static_cast<std::int32_t>(m > A(0) ? at_most : A(0))], 1);
    }
  }
  if constexpr (Shared) {
    __syncthreads();
    const std::int64_t n = min(std::int64_t{kColumns}, experts - first) * bins;
    for (std::int64_t i = threadIdx.x; i < n; i += kThreads)
      if (counts[i] != 0) atomicAdd(&histogram[first * bins + i], counts[i]);
  }
}

// value[e] = the quantile of expert e: one warp per expert, 32 bins at a time.
template <class A>
__global__ void __launch_bounds__(kThreads) quantile_kernel(double* value,
                                                            const A* bias,
                                                            const std::int32_t* histogram,
                                                            Scalar tokens,
                                                            Scalar skip,
                                                            std::int64_t top_k,
                                                            std::int64_t experts,
                                                            std::int64_t bins) {
  if (skip.is_set()) return;
  const Bins b = bins_of(bias, experts, bins);
  const double q = tokens.read() * static_cast<double>(top_k) / static_cast<double>(experts);
  const double wanted = ceil(q);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t e = std::int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (e >= experts) return;
  std::int64_t before = 0;
  for (std::int64_t first = 0; first < bins; first += kWarp) {
    const std::int64_t m = first + lane;
    const std::int32_t own = m < bins ? histogram[e * bins + m] : 0;
    std::int64_t upto = own;  // inclusive over lanes
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const std::int64_t other = __shfl_up_sync(0xffffffffU, upto, offset);
      if (lane >= offset) upto += other;
    }
    const bool reached = own > 0 && static_cast<double>(before + upto) >= wanted;
    const unsigned lanes = __ballot_sync(0xffffffffU, reached);
    if (lanes != 0) {
      if (lane == __ffs(static_cast<int>(lanes)) - 1) {
        const double share =
            (q - static_cast<double>(before + upto - own)) / static_cast<double>(own);
        const double clipped = share < 0.0 ? 0.0 : (share > 1.0 ? 1.0 : share);
        value[e] = fma(static_cast<double>(m) + clipped, b.width, b.low);
      }
      return;
    }
    before += __shfl_sync(0xffffffffU, upto, kWarp - 1);
  }
  if (lane == 0) value[e] = fma(static_cast<double>(bins), b.width, b.low);
}

// bias[e] = value[e] minus the mean of all values, summed in order by one thread of one block. With
// `tokens`, nothing happens in a step without any.
template <class A>
__global__ void __launch_bounds__(kOneBlock)
    centre_kernel(A* bias, const double* value, Scalar tokens, Scalar skip, std::int64_t experts) {
  __shared__ double fetched[kOneBlock];
  __shared__ double mean;
  if (skip.is_set() || (tokens.data != nullptr && !(tokens.read() > 0))) return;
  double sum = 0;
  for (std::int64_t begin = 0; begin < experts; begin += kOneBlock) {
    const std::int64_t e = begin + threadIdx.x;
    if (e < experts) fetched[threadIdx.x] = value[e];
    __syncthreads();
    if (threadIdx.x == 0) {
      const int count = static_cast<int>(min(std::int64_t{kOneBlock}, experts - begin));
#pragma unroll 8
      for (int i = 0; i < count; ++i)
        sum += fetched[i];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) mean = sum / static_cast<double>(experts);
  __syncthreads();
  for (std::int64_t e = threadIdx.x; e < experts; e += kOneBlock)
    bias[e] = static_cast<A>(value[e] - mean);
}

template <class A>
__global__ void __launch_bounds__(kThreads) margins_kernel(
    A* margins, const A* scores, const A* cutoff, std::int64_t tokens, std::int64_t experts) {
  for (std::int64_t t = blockIdx.x; t < tokens; t += gridDim.x) {
    const A alpha = cutoff[t];
    for (std::int64_t e = threadIdx.x; e < experts; e += kThreads)
      margins[t * experts + e] = scores[t * experts + e] - alpha;
  }
}

// value[e] = -(the rank-th largest margin of expert e, from 1). A block does a radix selection for
// kColumns experts at once: a pass over the tokens per digit.
template <class A>
__global__ void __launch_bounds__(kPickDigits) exact_kernel(double* value,
                                                            const A* margins,
                                                            Scalar skip,
                                                            std::int64_t tokens,
                                                            std::int64_t experts,
                                                            int rank) {
  using Key = order_key_t<A>;
  constexpr int kPitch = kPickDigits + 1;  // keeps equal digits of two experts in different banks
  constexpr int kPass = kPickDigits / kColumns;
  __shared__ int histogram[kColumns * kPitch];
  __shared__ Key prefix[kColumns];
  __shared__ int wanted[kColumns];
  if (skip.is_set()) return;
  const int thread = static_cast<int>(threadIdx.x), column = thread % kColumns;
  const std::int64_t expert = std::int64_t{blockIdx.x} * kColumns + column;
  if (thread < kColumns) {
    prefix[thread] = 0;
    wanted[thread] = rank;
  }
  Key mask = 0;
  for (int shift = static_cast<int>(sizeof(Key)) * 8 - 8; shift >= 0; shift -= 8) {
    for (int i = thread; i < kColumns * kPitch; i += kPickDigits)
      histogram[i] = 0;
    __syncthreads();
    const Key own_prefix = prefix[column];
    if (expert < experts) {
#pragma unroll 4
      for (std::int64_t t = thread / kColumns; t < tokens; t += kPass) {
        const Key key = OrderKey<A>::of(margins[t * experts + expert]);
        if ((key & mask) == own_prefix)
          atomicAdd(&histogram[column * kPitch + static_cast<int>(key >> shift & 0xffU)], 1);
      }
    }
    __syncthreads();
    for (int c = 0; c < kColumns; ++c) {
      if (std::int64_t{blockIdx.x} * kColumns + c >= experts) break;
      const DigitPick pick = pick_digit(histogram[c * kPitch + thread], wanted[c]);
      if (thread == 0) {
        prefix[c] |= static_cast<Key>(pick.digit) << shift;
        wanted[c] -= pick.above;
      }
    }
    mask |= Key{0xff} << shift;
    __syncthreads();
  }
  if (thread < kColumns && expert < experts)
    value[expert] = -static_cast<double>(OrderKey<A>::value(prefix[thread]));
}

template <class F>
void dispatch_stats(DType dtype, F&& f) {
  if (dtype == DType::f64) return f(TypeTag<double>{});
  f(TypeTag<float>{});
}
unsigned blocks_of(std::int64_t work, std::int64_t per_block) {
  return static_cast<unsigned>((work + per_block - 1) / per_block);
}

template <class A>
void centre(CudaContext& context,
            const TensorView& bias,
            const TensorView& value,
            Scalar tokens,
            Scalar skip) {
  centre_kernel<A><<<1, kOneBlock, 0, native_stream(context)>>>(
      bias.as<A>(), value.as<double>(), tokens, skip, bias.dim(0));
  check_launch("kernel balance_bias: centre");
}

template <class A>
void count(CudaContext& context, const BalanceHistogram& op) {
  const std::int64_t tokens = op.scores.dim(0), experts = op.scores.dim(1),
                     bins = op.histogram.dim(1);
  const dim3 grid(blocks_of(experts, kColumns), blocks_of(tokens, kTokensPerBlock));
  const auto start = [&](auto kernel, std::int64_t counts) {
    kernel<<<grid,
             kThreads,
             static_cast<std::size_t>(counts) * sizeof(std::int32_t),
             native_stream(context)>>>(op.histogram.as<std::int32_t>(),
                                       op.scores.as<A>(),
                                       op.cutoff.as<A>(),
                                       op.bias.as<A>(),
                                       tokens,
                                       experts,
                                       bins);
  };
  if (kColumns * bins <= kSharedCounts) {
    start(histogram_kernel<A, true>, kColumns * bins);
  } else {
    start(histogram_kernel<A, false>, 0);
  }
  check_launch("kernel balance_histogram");
}

}  // namespace

void launch(CudaContext& context, const BalanceHistogram& op) {
  if (is_dry(context) || op.scores.numel() == 0) return;
  dispatch_stats(op.scores.dtype(), [&]<class A>(TypeTag<A>) { count<A>(context, op); });
}

void launch(CudaContext& context, const BalanceBiasFromHistogram& op) {
  const Arena::Mark mark(context.scratch);
  const std::int64_t experts = op.bias.dim(0);
  const TensorView value = context.scratch.take({experts}, DType::f64, "balance_bias.value");
  if (is_dry(context)) return;
  dispatch_stats(op.bias.dtype(), [&]<class A>(TypeTag<A>) {
    quantile_kernel<A>
        <<<blocks_of(experts, kThreads / kWarp), kThreads, 0, native_stream(context)>>>(
            value.as<double>(),
            op.bias.as<A>(),
            op.histogram.as<std::int32_t>(),
            Scalar(op.tokens),
            Scalar(op.skip),
            op.top_k,
            experts,
            op.histogram.dim(1));
    check_launch("kernel balance_bias: quantiles");
    centre<A>(context, op.bias, value, Scalar(op.tokens), Scalar(op.skip));
  });
}

void launch(CudaContext& context, const BalanceMargins& op) {
  if (is_dry(context) || op.scores.numel() == 0) return;
  dispatch_stats(op.scores.dtype(), [&]<class A>(TypeTag<A>) {
    margins_kernel<A><<<grid_for(context, op.scores.dim(0)), kThreads, 0, native_stream(context)>>>(
        op.margins.as<A>(),
        op.scores.as<A>(),
        op.cutoff.as<A>(),
        op.scores.dim(0),
        op.scores.dim(1));
    check_launch("kernel balance_margins");
  });
}

void launch(CudaContext& context, const BalanceBiasExact& op) {
  const Arena::Mark mark(context.scratch);
  const std::int64_t experts = op.bias.dim(0), tokens = op.margins.dim(0);
  const TensorView value = context.scratch.take({experts}, DType::f64, "balance_bias.value");
  if (is_dry(context)) return;
  const std::int64_t larger = std::min(tokens * op.top_k / experts, tokens - 1);  // margins above
  dispatch_stats(op.bias.dtype(), [&]<class A>(TypeTag<A>) {
    exact_kernel<A><<<blocks_of(experts, kColumns), kPickDigits, 0, native_stream(context)>>>(
        value.as<double>(),
        op.margins.as<A>(),
        Scalar(op.skip),
        tokens,
        experts,
        static_cast<int>(larger + 1));
    check_launch("kernel balance_bias: order statistics");
    centre<A>(context, op.bias, value, Scalar(), Scalar(op.skip));
  });
}

}  // namespace moesaic
