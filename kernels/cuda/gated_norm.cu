// Gated RMSNorm: 16 or 32 threads per head of usual width, a block for wider ones. A backward block walks through a fixed
// range of rows, so that the gradient of the weight needs no second reading.
#include "kernels/cuda/column_sums.cuh"
#include "kernels/cuda/gate_math.cuh"
#include "kernels/cuda/map.cuh"
#include "kernels/ops/gated_norm.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 256;
template <class T>
constexpr bool kFastMath = std::is_same_v<T, __nv_bfloat16>;

// No pointer is __restrict__: results may lie on operands; each thread reads what it overwrites itself.
template <class T, class W, class A, int N, int PerRow>
__global__ void __launch_bounds__(kThreads) forward_kernel(T* y,
                                                           A* inv_rms,
                                                           const T* x,
                                                           const T* gate,
                                                           const W* weight,
                                                           std::int64_t rows,
                                                           std::int64_t width,
                                                           A eps) {
  constexpr int kRows = kThreads / PerRow;
  const int lane = static_cast<int>(threadIdx.x) % PerRow;
  for (std::int64_t t = std::int64_t{blockIdx.x} * kRows + threadIdx.x / PerRow; t < rows;
       t += std::int64_t{gridDim.x} * kRows) {
    const std::int64_t base = t * width;
    A sum = 0;
    for (std::int64_t c = std::int64_t{lane} * N; c < width; c += PerRow * N) {
      const auto xv = load<N>(x + base + c);
#pragma unroll
      for (int i = 0; i < N; ++i)
        sum += widen<A>(xv.v[i]) * widen<A>(xv.v[i]);
    }
    sum = shared_row_sum<PerRow>(sum);
    const A rho = A(1) / sqrt(sum / static_cast<A>(width) + eps);
    if (lane == 0) inv_rms[t] = rho;
    for (std::int64_t c = std::int64_t{lane} * N; c < width; c += PerRow * N) {
      auto v = load<N>(x + base + c);
      const auto g = load<N>(gate + base + c);
      const auto w = load<N>(weight + c);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        v.v[i] = round_to<T>(widen<A>(v.v[i]) * rho * widen<A>(w.v[i]) *
                             sigmoid<kFastMath<T>>(widen<A>(g.v[i])));
      }
      store<N>(y + base + c, v);
    }
  }
}

template <class T, class A>
struct Backward {
  T* dx;
  T* dgate;
  const T* dy;
  const T* x;
  const T* gate;
  const A* inv_rms;
  std::int64_t rows, width, rows_per_block;
};

template <class T, class W, class A, int N, int PerRow, bool kOneAccess>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(Backward<T, A> p, const W* weight, A* partials) {
  constexpr int kRows = kThreads / PerRow;
  constexpr bool kFast = kFastMath<T>;
  const int lane = static_cast<int>(threadIdx.x) % PerRow;
  const std::int64_t first = std::int64_t{blockIdx.x} * p.rows_per_block,
                     end = min(p.rows, first + p.rows_per_block);
  ColumnSums<A, N, PerRow, kThreads, kOneAccess> dweight(
      partials == nullptr ? nullptr : partials + std::int64_t{blockIdx.x} * p.width, p.width);
  for (std::int64_t t = first + threadIdx.x / PerRow; t < end; t += kRows) {
    const std::int64_t base = t * p.width;
    const A rho = p.inv_rms[t];
    A dot = 0;
    for (std::int64_t c = std::int64_t{lane} * N; c < p.width; c += PerRow * N) {
      const auto xv = load<N>(p.x + base + c);
      const auto g = load<N>(p.gate + base + c);
      const auto d = load<N>(p.dy + base + c);
      const auto w = load<N>(weight + c);
      A sums[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const A part = widen<A>(d.v[i]) * sigmoid<kFast>(widen<A>(g.v[i])) * widen<A>(xv.v[i]);
        dot += part * widen<A>(w.v[i]);
        sums[i] = part * rho;
      }
      dweight.add(c, sums);
    }
    const A mean = shared_row_sum<PerRow>(dot) * rho / static_cast<A>(p.width);
    for (std::int64_t c = std::int64_t{lane} * N; c < p.width; c += PerRow * N) {
      auto xv = load<N>(p.x + base + c);
      auto g = load<N>(p.gate + base + c);
      const auto d = load<N>(p.dy + base + c);
      const auto w = load<N>(weight + c);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        A s, complement;
        sigmoid_pair<kFast>(widen<A>(g.v[i]), s, complement);
        const A grad = widen<A>(d.v[i]) * widen<A>(w.v[i]), xh = widen<A>(xv.v[i]) * rho;
        xv.v[i] = round_to<T>(rho * (grad * s - xh * mean));
        g.v[i] = round_to<T>(grad * xh * s * complement);
      }
      store<N>(p.dx + base + c, xv);
      store<N>(p.dgate + base + c, g);
    }
  }
  dweight.finish();
}

template <class T, class W>
void forward(const CudaContext& context, const GatedRmsNormForward& op) {
  using A = acc_t<T>;
  using D = device_t<T>;
  const std::int64_t rows = op.x.dim(0) * op.x.dim(1), width = op.x.dim(2);
  with_vector<kWide<T>>(
      width,
      {op.y.data(), op.x.data(), op.gate.data(), op.weight.data()},
      [&]<int N>(std::integral_constant<int, N>) {
        with_threads_per_row<N, kThreads>(
            width,
            [&]<int PerRow, bool kOneAccess>(std::integral_constant<int, PerRow>,
                                             std::integral_constant<bool, kOneAccess>) {
              constexpr int kRows = kThreads / PerRow;
              forward_kernel<D, device_t<W>, A, N, PerRow>
                  <<<grid_for(context, (rows + kRows - 1) / kRows, 16),
                     kThreads,
                     0,
                     native_stream(context)>>>(device_data<T>(op.y),
                                               op.inv_rms.as<A>(),
                                               device_data<T>(op.x),
                                               device_data<T>(op.gate),
                                               device_data<W>(op.weight),
                                               rows,
                                               width,
                                               static_cast<A>(op.eps));
            });
      });
  check_launch("kernel gated_rms_norm_forward");
}

RowBlocks row_blocks(const GatedRmsNormBackward& op) {
  return RowBlocks(op.x.dim(0) * op.x.dim(1), 64, 2048);
}

template <class T, class W>
void backward(const CudaContext& context,
              const GatedRmsNormBackward& op,
              const TensorView& partials) {
  using A = acc_t<T>;
  using D = device_t<T>;
  const std::int64_t width = op.x.dim(2);
  const RowBlocks blocks = row_blocks(op);
  const Backward<D, A> p{device_data<T>(op.dx),
                         device_data<T>(op.dgate),
                         device_data<T>(op.dy),
                         device_data<T>(op.x),
                         device_data<T>(op.gate),
                         op.inv_rms.as<A>(),
                         op.x.dim(0) * op.x.dim(1),
                         width,
                         blocks.rows_per_block};
  with_vector<kWide<T>>(
      width,
      {p.dx, p.dgate, p.dy, p.x, p.gate, op.weight.data()},
      [&]<int N>(std::integral_constant<int, N>) {
        with_threads_per_row<N, kThreads>(
            width,
            [&]<int PerRow, bool kOneAccess>(std::integral_constant<int, PerRow>,
                                             std::integral_constant<bool, kOneAccess>) {
              backward_kernel<D, device_t<W>, A, N, PerRow, kOneAccess>
                  <<<static_cast<unsigned>(blocks.count), kThreads, 0, native_stream(context)>>>(
                      p, device_data<W>(op.weight), partials.as<A>());
            });
      });
  check_launch("kernel gated_rms_norm_backward");
  if (partials.empty()) return;
  finish_columns(context,
                 partials.as<A>(),
                 blocks.count,
                 width,
                 width,
                 AddTo<A>{op.dweight.as<A>()},
                 "kernel gated_rms_norm_backward: weight gradient");
}

template <class T, class A>
struct GateAt {
  T* y;
  const T* x;
  const T* gate;
  template <int N>
  __device__ __forceinline__ void at(std::int64_t i) const {
    auto v = load<N>(x + i);
    const auto g = load<N>(gate + i);
#pragma unroll
    for (int j = 0; j < N; ++j)
      v.v[j] = round_to<T>(widen<A>(v.v[j]) * sigmoid<kFastMath<T>>(widen<A>(g.v[j])));
    store<N>(y + i, v);
  }
};

template <class T, class A>
struct GateBackwardAt {
  T* dx;
  T* dgate;
  const T* dy;
  const T* x;
  const T* gate;
  template <int N>
  __device__ __forceinline__ void at(std::int64_t i) const {
    auto v = load<N>(x + i);
    auto g = load<N>(gate + i);
    const auto d = load<N>(dy + i);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      A s, complement;
      sigmoid_pair<kFastMath<T>>(widen<A>(g.v[j]), s, complement);
      const A grad = widen<A>(d.v[j]), value = widen<A>(v.v[j]);
      v.v[j] = round_to<T>(grad * s);
      g.v[j] = round_to<T>(grad * value * s * complement);
    }
    store<N>(dx + i, v);
    store<N>(dgate + i, g);
  }
};

}  // namespace

void launch(CudaContext& context, const GatedRmsNormForward& op) {
  if (is_dry(context) || op.x.numel() == 0) return;
  dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
    dispatch_weight<T>(op.weight.dtype(), [&]<class W>(TypeTag<W>) { forward<T, W>(context, op); });
  });
}

void launch(CudaContext& context, const GatedRmsNormBackward& op) {
  if (op.x.numel() == 0) return;
  const Arena::Mark mark(context.scratch);
  TensorView partials;
  if (!op.dweight.empty()) {
    partials = context.scratch.take(
        {row_blocks(op).count, op.x.dim(2)}, op.dweight.dtype(), "gated_norm.dweight");
  }
  if (is_dry(context)) return;
  dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
    dispatch_weight<T>(op.weight.dtype(),
                       [&]<class W>(TypeTag<W>) { backward<T, W>(context, op, partials); });
  });
}

void launch(CudaContext& context, const SigmoidGateForward& op) {
  if (is_dry(context) || op.x.numel() == 0) return;
  dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
    map<kWide<T>>(context,
                  "kernel sigmoid_gate_forward",
                  op.x.numel(),
                  {op.y.data(), op.x.data(), op.gate.data()},
                  GateAt<device_t<T>, acc_t<T>>{
                      device_data<T>(op.y), device_data<T>(op.x), device_data<T>(op.gate)});
  });
}

void launch(CudaContext& context, const SigmoidGateBackward& op) {
  if (is_dry(context) || op.x.numel() == 0) return;
  dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
    map<kWide<T>>(context,
                  "kernel sigmoid_gate_backward",
                  op.x.numel(),
                  {op.dx.data(), op.dgate.data(), op.dy.data(), op.x.data(), op.gate.data()},
                  GateBackwardAt<device_t<T>, acc_t<T>>{device_data<T>(op.dx),
                                                        device_data<T>(op.dgate),
                                                        device_data<T>(op.dy),
                                                        device_data<T>(op.x),
                                                        device_data<T>(op.gate)});
  });
}

}  // namespace moesaic
