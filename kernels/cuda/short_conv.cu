// Short convolution: the kernels for 4 taps (short_conv_four.cuh) or for any number (short_conv_any.cuh), and the second stage
// of the sum over tokens.
#include "kernels/cuda/short_conv_four.cuh"
#include "kernels/cuda/token_sums.cuh"
#include "kernels/ops/short_conv.h"

namespace moesaic {
namespace {

using namespace cuda;        // NOLINT(google-build-using-namespace): device helpers
using namespace cuda::conv;  // NOLINT(google-build-using-namespace): kernels for 4 taps

// Calls f with the channels of one access, 4 or 2 (8 or 16 bytes), or 1 unless every row starts aligned.
template <class T, class F>
void with_vector(std::int64_t channels, std::initializer_list<const void*> pointers, F&& f) {
  constexpr int kWide = sizeof(T) == 2 ? 4 : 2;
  bool wide = channels % kWide == 0;
  for (const void* p : pointers)
    wide = wide && is_aligned(p, 16);
  if (wide) return f(std::integral_constant<int, kWide>{});
  f(std::integral_constant<int, 1>{});
}
dim3 run_grid(std::int64_t tokens, int run, std::int64_t channels, int n) {
  return {static_cast<unsigned>((tokens + run * kLanes - 1) / (run * kLanes)),
          static_cast<unsigned>((channels + kColumns * n - 1) / (kColumns * n))};
}
std::int64_t backward_runs(std::int64_t tokens) {
  return (tokens + kBackwardRun - 1) / kBackwardRun;
}
std::int64_t backward_blocks(std::int64_t tokens) {
  return (tokens + kBackwardBlock - 1) / kBackwardBlock;
}

template <class Op>
Documents documents_of(const Op& op) {
  return {op.cu_seqlens.template as<std::int32_t>(), op.cu_seqlens.dim(0) - 1};
}
template <class T, class Op>
ConvRows<device_t<T>> rows_of(const Op& op, std::int64_t taps) {
  return {reinterpret_cast<const device_t<T>*>(op.x.template as<T>()),
          reinterpret_cast<const device_t<T>*>(op.history.template as<T>()),
          op.history.empty() ? 0 : op.history.dim(0),
          op.x.dim(1),
          taps};
}

template <class T, class W>
void forward(const CudaContext& context, const ShortConvForward& op) {
  using A = acc_t<T>;
  using D = device_t<T>;
  const std::int64_t tokens = op.x.dim(0), channels = op.x.dim(1);
  const auto stream = native_stream(context);
  const auto rows = rows_of<T>(op, op.w.dim(1));
  const auto* w = reinterpret_cast<const device_t<W>*>(op.w.as<W>());
  auto* y = reinterpret_cast<D*>(op.y.as<T>());
  if (op.w.dim(1) != kTaps)
    return conv_any_forward<A>(context, stream, y, rows, w, documents_of(op), tokens, op.silu);
  with_vector<T>(
      channels, {y, rows.x, rows.history, w}, [&]<int N>(std::integral_constant<int, N>) {
        forward_kernel<D, device_t<W>, A, N>
            <<<run_grid(tokens, kForwardRun, channels, N), dim3(kColumns, kLanes), 0, stream>>>(
                y, rows, w, documents_of(op), tokens, op.silu);
      });
  check_launch("kernel short_conv_forward");
}

struct BackwardScratch {
  TensorView borders, partials, dpre;

  BackwardScratch(CudaContext& context, const ShortConvBackward& op) {
    const std::int64_t tokens = op.x.dim(0), channels = op.x.dim(1), taps = op.w.dim(1);
    const DType wide = op.x.dtype() == DType::f64 ? DType::f64 : DType::f32;
    if (taps == kTaps) {
      borders = context.scratch.take(
          {backward_runs(tokens), kTaps - 1, channels}, op.x.dtype(), "short_conv.borders");
    } else {
      dpre = context.scratch.take({tokens, channels}, wide, "short_conv.dpre");
    }
    if (!op.dw.empty()) {
      partials =
          context.scratch.take({backward_blocks(tokens), channels, taps}, wide, "short_conv.dw");
    }
  }
};

template <class T, class W>
void backward_four(const CudaContext& context,
                   const ShortConvBackward& op,
                   const BackwardScratch& scratch) {
  using A = acc_t<T>;
  using D = device_t<T>;
  const std::int64_t tokens = op.x.dim(0), channels = op.x.dim(1);
  const auto stream = native_stream(context);
  const auto rows = rows_of<T>(op, kTaps);
  const auto* w = reinterpret_cast<const device_t<W>*>(op.w.as<W>());
  auto* dx = reinterpret_cast<D*>(op.dx.as<T>());
  const auto* dy = reinterpret_cast<const D*>(op.dy.as<T>());
  D* borders = dx == dy ? reinterpret_cast<D*>(scratch.borders.as<T>()) : nullptr;
  with_vector<T>(
      channels, {dx, dy, rows.x, rows.history, w}, [&]<int N>(std::integral_constant<int, N>) {
        const dim3 grid = run_grid(tokens, kBackwardRun, channels, N), block(kColumns, kLanes);
        if (borders != nullptr) {
          keep_borders_kernel<D, N>
              <<<grid, block, 0, stream>>>(borders, dy, backward_runs(tokens), tokens, channels);
          check_launch("kernel short_conv_backward: borders of runs");
        }
        backward_kernel<D, device_t<W>, A, N><<<grid, block, 0, stream>>>(
            dx, scratch.partials.as<A>(), dy, borders, rows, w, documents_of(op), tokens, op.silu);
      });
  check_launch("kernel short_conv_backward");
}

template <class T, class W>
void backward(const CudaContext& context,
              const ShortConvBackward& op,
              const BackwardScratch& scratch) {
  using A = acc_t<T>;
  using D = device_t<T>;
  const std::int64_t tokens = op.x.dim(0), channels = op.x.dim(1), taps = op.w.dim(1);
  const auto stream = native_stream(context);
  const auto rows = rows_of<T>(op, taps);
  const auto* w = reinterpret_cast<const device_t<W>*>(op.w.as<W>());
  const auto* dy = reinterpret_cast<const D*>(op.dy.as<T>());
  if (!op.dhistory.empty()) {  // before dx, which may overwrite dy
    conv_history_gradient<A>(stream,
                             reinterpret_cast<D*>(op.dhistory.as<T>()),
                             op.dhistory.dim(0),
                             dy,
                             rows,
                             w,
                             documents_of(op),
                             op.silu);
  }
  if (tokens == 0) return;
  if (taps == kTaps) {
    backward_four<T, W>(context, op, scratch);
  } else {
    conv_any_backward<A>(context,
                         stream,
                         reinterpret_cast<D*>(op.dx.as<T>()),
                         scratch.partials.as<A>(),
                         scratch.dpre.as<A>(),
                         dy,
                         rows,
                         w,
                         documents_of(op),
                         tokens,
                         kBackwardBlock,
                         op.silu);
  }
  if (!op.dw.empty()) {
    add_token_sums(
        stream, op.dw.as<A>(), scratch.partials.as<A>(), backward_blocks(tokens), channels * taps);
  }
}

}  // namespace

void launch(CudaContext& context, const ShortConvForward& op) {
  if (is_dry(context) || op.x.numel() == 0) return;
  dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
    dispatch_weight<T>(op.w.dtype(), [&]<class W>(TypeTag<W>) { forward<T, W>(context, op); });
  });
}

void launch(CudaContext& context, const ShortConvBackward& op) {
  if (op.x.dim(1) == 0) return;
  const Arena::Mark mark(context.scratch);
  const BackwardScratch scratch(context, op);
  if (is_dry(context)) return;
  dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
    dispatch_weight<T>(op.w.dtype(),
                       [&]<class W>(TypeTag<W>) { backward<T, W>(context, op, scratch); });
  });
}

void launch(CudaContext& context, const ShortConvTail& op) {
  if (is_dry(context) || op.next.numel() == 0) return;
  dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
    conv_tail(native_stream(context),
              reinterpret_cast<device_t<T>*>(op.next.as<T>()),
              rows_of<T>(op, op.next.dim(1) + 1),
              documents_of(op));
  });
}

}  // namespace moesaic
