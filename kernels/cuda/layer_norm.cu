// LayerNorm and L2 norm: 16 or 32 threads for rows of up to as many accesses, a block for longer ones; what a row needs
// again comes from the cache. A backward block of LayerNorm walks through a fixed range of rows, so that the gradients of
// weight and bias need no second reading.
#include "kernels/cuda/column_sums.cuh"
#include "kernels/ops/layer_norm.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 256;

// No pointer is __restrict__: y may be x, dx may be dy; each thread reads what it overwrites itself.
template <class T, class A>
struct Forward {
  T* y;
  A* mean;
  A* inv_std;
  const T* x;
  std::int64_t rows, width;
  A eps;
};

template <class T, class W, class A, int N, int PerRow>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(Forward<T, A> p, const W* weight, const W* bias) {
  constexpr int kRows = kThreads / PerRow;
  const int lane = static_cast<int>(threadIdx.x) % PerRow;
  for (std::int64_t t = std::int64_t{blockIdx.x} * kRows + threadIdx.x / PerRow; t < p.rows;
       t += std::int64_t{gridDim.x} * kRows) {
    const T* x = p.x + t * p.width;
    A sum = 0;
    for (std::int64_t c = std::int64_t{lane} * N; c < p.width; c += PerRow * N) {
      const auto xv = load<N>(x + c);
#pragma unroll
      for (int i = 0; i < N; ++i)
        sum += widen<A>(xv.v[i]);
    }
    const A mean = shared_row_sum<PerRow>(sum) / static_cast<A>(p.width);
    A squares = 0;  // of the centred values: no cancellation for a large mean
    for (std::int64_t c = std::int64_t{lane} * N; c < p.width; c += PerRow * N) {
      const auto xv = load<N>(x + c);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const A centred = widen<A>(xv.v[i]) - mean;
        squares += centred * centred;
      }
    }
    squares = shared_row_sum<PerRow>(squares);
    const A inv = A(1) / sqrt(squares / static_cast<A>(p.width) + p.eps);
    if (lane == 0) {
      p.mean[t] = mean;
      p.inv_std[t] = inv;
    }
    for (std::int64_t c = std::int64_t{lane} * N; c < p.width; c += PerRow * N) {
      auto v = load<N>(x + c);
      const auto w = load<N>(weight + c);
      const auto b = load<N>(bias + c);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        v.v[i] = round_to<T>((widen<A>(v.v[i]) - mean) * inv * widen<A>(w.v[i]) + widen<A>(b.v[i]));
      }
      store<N>(p.y + t * p.width + c, v);
    }
  }
}

template <class T, class A>
struct Backward {
  T* dx;
  const T* dy;
  const T* x;
  const A* mean;
  const A* inv_std;
  A* weight_partials;  // null: frozen
  A* bias_partials;
  std::int64_t rows, width, rows_per_block;
};

template <class T, class W, class A, int N, int PerRow, bool kOneAccess>
__global__ void __launch_bounds__(kThreads) backward_kernel(Backward<T, A> p, const W* weight) {
  constexpr int kRows = kThreads / PerRow;
  const int lane = static_cast<int>(threadIdx.x) % PerRow;
  const std::int64_t first = std::int64_t{blockIdx.x} * p.rows_per_block,
                     end = min(p.rows, first + p.rows_per_block);
  const std::int64_t at = std::int64_t{blockIdx.x} * p.width;
  using Sums = ColumnSums<A, N, PerRow, kThreads, kOneAccess>;
  Sums dweight(p.weight_partials == nullptr ? nullptr : p.weight_partials + at, p.width);
  Sums dbias(p.bias_partials == nullptr ? nullptr : p.bias_partials + at, p.width);
  for (std::int64_t t = first + threadIdx.x / PerRow; t < end; t += kRows) {
    const std::int64_t base = t * p.width;
    const A mean = p.mean[t], inv = p.inv_std[t];
    A sum = 0, dot = 0;
    for (std::int64_t c = std::int64_t{lane} * N; c < p.width; c += PerRow * N) {
      const auto xv = load<N>(p.x + base + c);
      const auto d = load<N>(p.dy + base + c);
      const auto w = load<N>(weight + c);
      A grads[N], grads_xh[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const A xh = (widen<A>(xv.v[i]) - mean) * inv;
        const A g = widen<A>(d.v[i]) * widen<A>(w.v[i]);
        sum += g;
        dot += g * xh;
        grads[i] = widen<A>(d.v[i]);
        grads_xh[i] = widen<A>(d.v[i]) * xh;
      }
      dweight.add(c, grads_xh);
      dbias.add(c, grads);
    }
    const A mean_g = shared_row_sum<PerRow>(sum) / static_cast<A>(p.width),
            mean_gx = shared_row_sum<PerRow>(dot) / static_cast<A>(p.width);
    for (std::int64_t c = std::int64_t{lane} * N; c < p.width; c += PerRow * N) {
      const auto xv = load<N>(p.x + base + c);
      auto d = load<N>(p.dy + base + c);
      const auto w = load<N>(weight + c);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const A xh = (widen<A>(xv.v[i]) - mean) * inv;
        d.v[i] = round_to<T>(inv * (widen<A>(d.v[i]) * widen<A>(w.v[i]) - mean_g - xh * mean_gx));
      }
      store<N>(p.dx + base + c, d);
    }
  }
  dweight.finish();
  dbias.finish();
}

template <class T, class A, int N, int PerRow>
__global__ void __launch_bounds__(kThreads) l2_forward_kernel(
    T* y, A* inv_norm, const T* x, std::int64_t rows, std::int64_t width, A eps, A scale) {
  constexpr int kRows = kThreads / PerRow;
  const int lane = static_cast<int>(threadIdx.x) % PerRow;
  for (std::int64_t t = std::int64_t{blockIdx.x} * kRows + threadIdx.x / PerRow; t < rows;
       t += std::int64_t{gridDim.x} * kRows) {
    A sum = 0;
    for (std::int64_t c = std::int64_t{lane} * N; c < width; c += PerRow * N) {
      const auto xv = load<N>(x + t * width + c);
#pragma unroll
      for (int i = 0; i < N; ++i)
        sum += widen<A>(xv.v[i]) * widen<A>(xv.v[i]);
    }
    const A r = A(1) / sqrt(shared_row_sum<PerRow>(sum) + eps);
    if (lane == 0) inv_norm[t] = r;
    const A factor = r * scale;
    for (std::int64_t c = std::int64_t{lane} * N; c < width; c += PerRow * N) {
      auto v = load<N>(x + t * width + c);
#pragma unroll
      for (int i = 0; i < N; ++i)
        v.v[i] = round_to<T>(widen<A>(v.v[i]) * factor);
      store<N>(y + t * width + c, v);
    }
  }
}

template <class T, class A, int N, int PerRow>
__global__ void __launch_bounds__(kThreads) l2_backward_kernel(T* dx,
                                                               const T* dy,
                                                               const T* x,
                                                               const A* inv_norm,
                                                               std::int64_t rows,
                                                               std::int64_t width,
                                                               A scale) {
  constexpr int kRows = kThreads / PerRow;
  const int lane = static_cast<int>(threadIdx.x) % PerRow;
  for (std::int64_t t = std::int64_t{blockIdx.x} * kRows + threadIdx.x / PerRow; t < rows;
       t += std::int64_t{gridDim.x} * kRows) {
    const std::int64_t base = t * width;
    A dot = 0;
    for (std::int64_t c = std::int64_t{lane} * N; c < width; c += PerRow * N) {
      const auto xv = load<N>(x + base + c);
      const auto d = load<N>(dy + base + c);
#pragma unroll
      for (int i = 0; i < N; ++i)
        dot += widen<A>(xv.v[i]) * widen<A>(d.v[i]);
    }
    const A r = inv_norm[t], m = shared_row_sum<PerRow>(dot) * r * r, factor = r * scale;
    for (std::int64_t c = std::int64_t{lane} * N; c < width; c += PerRow * N) {
      const auto xv = load<N>(x + base + c);
      auto d = load<N>(dy + base + c);
#pragma unroll
      for (int i = 0; i < N; ++i)
        d.v[i] = round_to<T>(factor * (widen<A>(d.v[i]) - widen<A>(xv.v[i]) * m));
      store<N>(dx + base + c, d);
    }
  }
}

// Calls f(N, PerRow, one access per thread and row).
template <class T, class F>
void with_rows(std::int64_t width, std::initializer_list<const void*> pointers, F&& f) {
  with_vector<kWide<T>>(width, pointers, [&]<int N>(std::integral_constant<int, N> n) {
    with_threads_per_row<N, kThreads>(
        width, [&](auto per_row, auto one_access) { f(n, per_row, one_access); });
  });
}
template <int PerRow>
unsigned row_grid(const CudaContext& context, std::int64_t rows) {
  constexpr int kRows = kThreads / PerRow;
  return grid_for(context, (rows + kRows - 1) / kRows, 16);
}

template <class T, class W>
void forward(const CudaContext& context, const LayerNormForward& op) {
  using A = acc_t<T>;
  const Forward<device_t<T>, A> p{device_data<T>(op.y),
                                  op.mean.as<A>(),
                                  op.inv_std.as<A>(),
                                  device_data<T>(op.x),
                                  op.x.dim(0),
                                  op.x.dim(1),
                                  static_cast<A>(op.eps)};
  with_rows<T>(p.width,
               {p.y, p.x, op.weight.data(), op.bias.data()},
               [&]<int N, int PerRow>(
                   std::integral_constant<int, N>, std::integral_constant<int, PerRow>, auto) {
                 forward_kernel<device_t<T>, device_t<W>, A, N, PerRow>
                     <<<row_grid<PerRow>(context, p.rows), kThreads, 0, native_stream(context)>>>(
                         p, device_data<W>(op.weight), device_data<W>(op.bias));
               });
  check_launch("kernel layer_norm_forward");
}

// `sums` holds the partials of dweight and then those of dbias, as far as they are wanted.
template <class T, class W>
void backward(const CudaContext& context, const LayerNormBackward& op, const TensorView& sums) {
  using A = acc_t<T>;
  const std::int64_t rows = op.x.dim(0), width = op.x.dim(1);
  const RowBlocks blocks(rows);
  A* next = sums.as<A>();
  const auto part_of = [&](const TensorView& gradient) -> A* {
    if (gradient.empty()) return nullptr;
    A* part = next;
    next += blocks.count * width;
    return part;
  };
  A* weight_partials = part_of(op.dweight);
  A* bias_partials = part_of(op.dbias);
  const Backward<device_t<T>, A> p{device_data<T>(op.dx),
                                   device_data<T>(op.dy),
                                   device_data<T>(op.x),
                                   op.mean.as<A>(),
                                   op.inv_std.as<A>(),
                                   weight_partials,
                                   bias_partials,
                                   rows,
                                   width,
                                   blocks.rows_per_block};
  with_rows<T>(width,
               {p.dx, p.dy, p.x, op.weight.data()},
               [&]<int N, int PerRow, bool kOneAccess>(std::integral_constant<int, N>,
                                                       std::integral_constant<int, PerRow>,
                                                       std::integral_constant<bool, kOneAccess>) {
                 backward_kernel<device_t<T>, device_t<W>, A, N, PerRow, kOneAccess>
                     <<<static_cast<unsigned>(blocks.count), kThreads, 0, native_stream(context)>>>(
                         p, device_data<W>(op.weight));
               });
  check_launch("kernel layer_norm_backward");
  const auto finish = [&](const A* partials, const TensorView& gradient) {
    if (partials == nullptr) return;
    finish_columns(context,
                   partials,
                   blocks.count,
                   width,
                   width,
                   AddTo<A>{gradient.as<A>()},
                   "kernel layer_norm_backward: weight gradients");
  };
  finish(weight_partials, op.dweight);
  finish(bias_partials, op.dbias);
}

}  // namespace

void launch(CudaContext& context, const LayerNormForward& op) {
  if (is_dry(context) || op.x.numel() == 0) return;
  dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
    dispatch_weight<T>(op.weight.dtype(), [&]<class W>(TypeTag<W>) { forward<T, W>(context, op); });
  });
}

void launch(CudaContext& context, const LayerNormBackward& op) {
  if (op.x.numel() == 0) return;
  const Arena::Mark mark(context.scratch);
  const std::int64_t wanted = (op.dweight.empty() ? 0 : 1) + (op.dbias.empty() ? 0 : 1);
  TensorView sums;
  if (wanted > 0) {
    sums = context.scratch.take(
        {wanted * RowBlocks(op.x.dim(0)).count, op.x.dim(1)}, op.mean.dtype(), "layer_norm.sums");
  }
  if (is_dry(context)) return;
  dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
    dispatch_weight<T>(op.weight.dtype(),
                       [&]<class W>(TypeTag<W>) { backward<T, W>(context, op, sums); });
  });
}

void launch(CudaContext& context, const L2NormForward& op) {
  if (is_dry(context) || op.x.numel() == 0) return;
  const std::int64_t rows = op.x.dim(0), width = op.x.dim(1);
  dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
    using A = acc_t<T>;
    with_rows<T>(width,
                 {op.y.data(), op.x.data()},
                 [&]<int N, int PerRow>(
                     std::integral_constant<int, N>, std::integral_constant<int, PerRow>, auto) {
                   l2_forward_kernel<device_t<T>, A, N, PerRow>
                       <<<row_grid<PerRow>(context, rows), kThreads, 0, native_stream(context)>>>(
                           device_data<T>(op.y),
                           op.inv_norm.as<A>(),
                           device_data<T>(op.x),
                           rows,
                           width,
                           static_cast<A>(op.eps),
                           static_cast<A>(op.scale));
                 });
    check_launch("kernel l2_norm_forward");
  });
}

void launch(CudaContext& context, const L2NormBackward& op) {
  if (is_dry(context) || op.x.numel() == 0) return;
  const std::int64_t rows = op.x.dim(0), width = op.x.dim(1);
  dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
    using A = acc_t<T>;
    with_rows<T>(width,
                 {op.dx.data(), op.dy.data(), op.x.data()},
                 [&]<int N, int PerRow>(
                     std::integral_constant<int, N>, std::integral_constant<int, PerRow>, auto) {
                   l2_backward_kernel<device_t<T>, A, N, PerRow>
                       <<<row_grid<PerRow>(context, rows), kThreads, 0, native_stream(context)>>>(
                           device_data<T>(op.dx),
                           device_data<T>(op.dy),
                           device_data<T>(op.x),
                           op.inv_norm.as<A>(),
                           rows,
                           width,
                           static_cast<A>(op.scale));
                 });
    check_launch("kernel l2_norm_backward");
  });
}

}  // namespace moesaic
