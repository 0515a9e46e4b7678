// RMSNorm: one warp per short row, one block per long one; a row is read twice, the second time
// from the cache. The sums of a row run in an order that depends on its length alone.
#include "kernels/cuda/column_sums.cuh"
#include "kernels/ops/rms_norm.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 256;
constexpr std::int64_t kLongRow = 1024;  // from here on a row gets a whole block

// No pointer is __restrict__: y may be x, dx may be dy. Each thread reads what it overwrites
// itself.
template <class T, class W, class A, int N, int PerRow>
__global__ void __launch_bounds__(kThreads) forward_kernel(
    T* y, A* inv_rms, const T* x, const W* weight, std::int64_t rows, std::int64_t hidden, A eps) {
  constexpr int kRows = kThreads / PerRow;
  const int lane = static_cast<int>(threadIdx.x) % PerRow;
  for (std::int64_t t = std::int64_t{blockIdx.x} * kRows + threadIdx.x / PerRow; t < rows;
       t += std::int64_t{gridDim.x} * kRows) {
    const T* row = x + t * hidden;
    A sum = 0;
    for (std::int64_t c = std::int64_t{lane} * N; c < hidden; c += PerRow * N) {
      const auto xv = load<N>(row + c);
#pragma unroll
      for (int i = 0; i < N; ++i)
        sum += widen<A>(xv.v[i]) * widen<A>(xv.v[i]);
    }
    sum = row_sum<PerRow>(sum);
    const A rho = A(1) / sqrt(sum / static_cast<A>(hidden) + eps);
    if (lane == 0) inv_rms[t] = rho;
    for (std::int64_t c = std::int64_t{lane} * N; c < hidden; c += PerRow * N) {
      auto v = load<N>(row + c);
      const auto w = load<N>(weight + c);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const T normalised = round_to<T>(widen<A>(v.v[i]) * rho);
        v.v[i] = round_to<T>(widen<A>(normalised) * widen<A>(w.v[i]));
      }
      store<N>(y + t * hidden + c, v);
    }
  }
}

template <class T, class W, class A, int N, int PerRow>
__global__ void __launch_bounds__(kThreads) backward_kernel(T* dx,
                                                            const T* dy,
                                                            const T* x,
                                                            const W* weight,
                                                            const A* inv_rms,
                                                            std::int64_t rows,
                                                            std::int64_t hidden,
                                                            bool accumulate) {
  constexpr int kRows = kThreads / PerRow;
  const int lane = static_cast<int>(threadIdx.x) % PerRow;
  for (std::int64_t t = std::int64_t{blockIdx.x} * kRows + threadIdx.x / PerRow; t < rows;
       t += std::int64_t{gridDim.x} * kRows) {
    const std::int64_t base = t * hidden;
    A dot = 0;
    for (std::int64_t c = std::int64_t{lane} * N; c < hidden; c += PerRow * N) {
      const auto xv = load<N>(x + base + c);
      const auto g = load<N>(dy + base + c);
      const auto w = load<N>(weight + c);
#pragma unroll
      for (int i = 0; i < N; ++i)
        dot += widen<A>(g.v[i]) * widen<A>(w.v[i]) * widen<A>(xv.v[i]);
    }
    const A rho = inv_rms[t];
    const A mean = row_sum<PerRow>(dot) * rho / static_cast<A>(hidden);
    for (std::int64_t c = std::int64_t{lane} * N; c < hidden; c += PerRow * N) {
      const auto xv = load<N>(x + base + c);
      const auto g = load<N>(dy + base + c);
      const auto w = load<N>(weight + c);
      Vec<T, N> out{};
      if (accumulate) out = load<N>(dx + base + c);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        A v = rho * (widen<A>(g.v[i]) * widen<A>(w.v[i]) - widen<A>(xv.v[i]) * rho * mean);
        if (accumulate) v += widen<A>(out.v[i]);
        out.v[i] = round_to<T>(v);
      }
      store<N>(dx + base + c, out);
    }
  }
}

// partials[b, c] = sum of dy xh over row block b. blockDim = (column groups of N, row lanes): lane
// y takes every blockDim.y-th row, then the lanes are added in order.
template <class T, class A, int N>
__global__ void __launch_bounds__(kThreads) weight_partials_kernel(A* partials,
                                                                   const T* dy,
                                                                   const T* x,
                                                                   const A* inv_rms,
                                                                   std::int64_t rows,
                                                                   std::int64_t hidden,
                                                                   std::int64_t rows_per_block) {
  __shared__ A lanes[kThreads * N];
  const std::int64_t c = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N;
  const std::int64_t begin = std::int64_t{blockIdx.y} * rows_per_block;
  const std::int64_t end = min(rows, begin + rows_per_block);
  A sum[N] = {};
  if (c < hidden) {
    for (std::int64_t t = begin + threadIdx.y; t < end; t += blockDim.y) {
      const auto xv = load<N>(x + t * hidden + c);
      const auto g = load<N>(dy + t * hidden + c);
      const A rho = inv_rms[t];
#pragma unroll
      for (int i = 0; i < N; ++i)
        sum[i] += widen<A>(g.v[i]) * widen<A>(xv.v[i]) * rho;
    }
  }
  const unsigned slot = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int i = 0; i < N; ++i)
    lanes[slot * N + i] = sum[i];
  __syncthreads();
  if (threadIdx.y != 0 || c >= hidden) return;
  for (unsigned y = 1; y < blockDim.y; ++y) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      sum[i] += lanes[(y * blockDim.x + threadIdx.x) * N + i];
  }
#pragma unroll
  for (int i = 0; i < N; ++i)
    partials[std::int64_t{blockIdx.y} * hidden + c + i] = sum[i];
}

template <class F>
void with_row_threads(std::int64_t hidden, F&& f) {
  if (hidden >= kLongRow) return f(std::integral_constant<int, kThreads>{});
  f(std::integral_constant<int, kWarp>{});
}
unsigned row_grid(const CudaContext& context, std::int64_t rows, int threads_per_row) {
  const int rows_per_block = kThreads / threads_per_row;
  return grid_for(context, (rows + rows_per_block - 1) / rows_per_block);
}

template <class T, class W>
void forward(CudaContext& context, const RmsNormForward& op) {
  using A = acc_t<T>;
  using D = device_t<T>;
  using V = device_t<W>;
  const std::int64_t rows = op.x.dim(0), hidden = op.x.dim(1);
  const auto stream = native_stream(context);
  auto* y = device_data<T>(op.y);
  const auto* x = device_data<T>(op.x);
  const auto* w = device_data<W>(op.weight);
  with_vector<kWide<T>>(hidden, {y, x, w}, [&]<int N>(std::integral_constant<int, N>) {
    with_row_threads(hidden, [&]<int PerRow>(std::integral_constant<int, PerRow>) {
      forward_kernel<D, V, A, N, PerRow><<<row_grid(context, rows, PerRow), kThreads, 0, stream>>>(
          y, op.inv_rms.as<A>(), x, w, rows, hidden, static_cast<A>(op.eps));
    });
  });
  check_launch("kernel rms_norm_forward");
}

template <class T, class W>
void backward(CudaContext& context, const RmsNormBackward& op) {
  using A = acc_t<T>;
  using D = device_t<T>;
  using V = device_t<W>;
  const std::int64_t rows = op.x.dim(0), hidden = op.x.dim(1);
  const auto stream = native_stream(context);
  auto* dx = device_data<T>(op.dx);
  const auto* dy = device_data<T>(op.dy);
  const auto* x = device_data<T>(op.x);
  const auto* w = device_data<W>(op.weight);
  with_vector<kWide<T>>(hidden, {dx, dy, x, w}, [&]<int N>(std::integral_constant<int, N>) {
    with_row_threads(hidden, [&]<int PerRow>(std::integral_constant<int, PerRow>) {
      backward_kernel<D, V, A, N, PerRow><<<row_grid(context, rows, PerRow), kThreads, 0, stream>>>(
          dx, dy, x, w, op.inv_rms.as<A>(), rows, hidden, op.accumulate_dx);
    });
  });
  check_launch("kernel rms_norm_backward");
}

// dy may be overwritten by dx afterwards, so this goes first.
template <class T>
void weight_gradient(CudaContext& context, const RmsNormBackward& op, TensorView partials) {
  using A = acc_t<T>;
  using D = device_t<T>;
  const std::int64_t rows = op.x.dim(0), hidden = op.x.dim(1);
  const RowBlocks blocks(rows);
  const auto stream = native_stream(context);
  const auto* dy = device_data<T>(op.dy);
  const auto* x = device_data<T>(op.x);
  with_vector<kWide<T>>(hidden, {dy, x}, [&]<int N>(std::integral_constant<int, N>) {
    const std::int64_t groups = (hidden + N - 1) / N;
    unsigned width = kWarp;  // small rows leave threads for further row lanes
    while (width < kThreads && width < groups)
      width *= 2;
    const dim3 block(width, kThreads / width);
    const dim3 grid(static_cast<unsigned>((groups + width - 1) / width),
                    static_cast<unsigned>(blocks.count));
    weight_partials_kernel<D, A, N><<<grid, block, 0, stream>>>(
        partials.as<A>(), dy, x, op.inv_rms.as<A>(), rows, hidden, blocks.rows_per_block);
  });
  check_launch("kernel rms_norm_backward: partial weight gradients");
  finish_columns(context,
                 partials.as<A>(),
                 blocks.count,
                 hidden,
                 hidden,
                 AddTo<A>{op.dweight.as<A>()},
                 "kernel rms_norm_backward: weight gradients");
}

}  // namespace

void launch(CudaContext& context, const RmsNormForward& op) {
  if (is_dry(context) || op.x.numel() == 0) return;
  dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
    dispatch_weight<T>(op.weight.dtype(), [&]<class W>(TypeTag<W>) { forward<T, W>(context, op); });
  });
}

void launch(CudaContext& context, const RmsNormBackward& op) {
  if (op.x.numel() == 0) return;
  const Arena::Mark mark(context.scratch);
  TensorView partials;
  if (!op.dweight.empty()) {
    partials = context.scratch.take(
        {RowBlocks(op.x.dim(0)).count, op.x.dim(1)}, op.dweight.dtype(), "rms_norm.dweight");
  }
  if (is_dry(context)) return;
  dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
    if (!op.dweight.empty()) weight_gradient<T>(context, op, partials);
    dispatch_weight<T>(op.weight.dtype(),
                       [&]<class W>(TypeTag<W>) { backward<T, W>(context, op); });
  });
}

}  // namespace moesaic
