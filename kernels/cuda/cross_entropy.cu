// Cross-entropy: a pass over the row forms the log-sum-exp with a running maximum, the next writes
// the gradient, in place if asked to; it finds part of the row in the cache.
#include <cstdint>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/device_check.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/vocab_rows.cuh"
#include "kernels/ops/vocab_loss.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

template <class T, class D, class A>
struct CrossEntropyArgs {
  const T* logits;
  D* dlogits;  // null: not wanted; may be logits
  const std::int32_t* targets;
  const A* weight;  // null: 1
  A* row_loss;
  A* row_z;
  A* logp;  // null: not wanted
  Gradient<A> gradient;
  A z_coef;
  std::int64_t rows, n;
};

template <class T, class D, class A, int N, int Threads>
__global__ void __launch_bounds__(Threads, kResident<A, Threads>)
    cross_entropy_kernel(const CrossEntropyArgs<T, D, A> op) {
  for (std::int64_t r = blockIdx.x; r < op.rows; r += gridDim.x) {
    const T* x = op.logits + r * op.n;
    D* d = op.dlogits == nullptr ? nullptr : op.dlogits + r * op.n;
    const std::int32_t target = op.targets[r];
    const bool ignored = target == kIgnoredTarget;
    const A w = ignored ? A(0) : op.weight == nullptr ? A(1) : op.weight[r];
    A lse = 0, at_target = 0, nll = 0;
    if (!ignored) {
      MOESAIC_DEVICE_CHECK(0 <= target && target < op.n, "a target is outside the vocabulary");
      at_target = widen<A>(x[target]);
      lse = log_sum_exp<A, N, Threads>(x, op.n);  // ends with a barrier: all have at_target
      nll = lse - at_target;
    }
    if (threadIdx.x == 0) {
      op.row_loss[r] = w * nll;
      op.row_z[r] = w * lse * lse;
      if (op.logp != nullptr) op.logp[r] = -nll;
    }
    if (d == nullptr) continue;
    if (w == A(0)) {
      zero_row<N, Threads>(d, op.n);
      continue;
    }
    const A scale = op.gradient.factor() * w;
    const A p_scale = scale * (A(1) + A(2) * op.z_coef * lse);
    for_row<N, Threads>(x, op.n, [&](std::int64_t v, const Vec<T, N>& xv) {
      Vec<D, N> out;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const A g = p_scale * exp(widen<A>(xv.v[i]) - lse);
        out.v[i] = round_to<D>(v + i == target ? g - scale : g);
      }
      store<N>(d + v, out);
    });
  }
}

template <class T, class G>
void cross_entropy(CudaContext& context,
                   const CrossEntropy& op,
                   const TensorView& row_loss,
                   const TensorView& row_z) {
  using A = acc_t<T>;
  using Args = CrossEntropyArgs<device_t<T>, device_t<G>, A>;
  const Args args{.logits = reinterpret_cast<const device_t<T>*>(op.logits.as<T>()),
                  .dlogits = reinterpret_cast<device_t<G>*>(op.dlogits.as<G>()),
                  .targets = op.targets.as<std::int32_t>(),
                  .weight = op.weight.as<A>(),
                  .row_loss = row_loss.as<A>(),
                  .row_z = row_z.as<A>(),
                  .logp = op.logp.as<A>(),
                  .gradient = {op.dlogits.empty() ? nullptr : op.divisor.as<A>(), op.grad_scale},
                  .z_coef = static_cast<A>(op.z_coef),
                  .rows = op.logits.dim(0),
                  .n = op.logits.dim(1)};
  with_shape<T>(
      args.n,
      {args.logits, args.dlogits},
      [&]<int N, int Threads>(std::integral_constant<int, N>,
                              std::integral_constant<int, Threads>) {
        cross_entropy_kernel<device_t<T>, device_t<G>, A, N, Threads>
            <<<grid_for(context, args.rows, 2048 / Threads), Threads, 0, native_stream(context)>>>(
                args);
      });
  check_launch("kernel cross_entropy");
  sum_rows<A>(context, op.loss_sum, row_loss, op.z_sum, row_z);
}

}  // namespace

void launch(CudaContext& context, const CrossEntropy& op) {
  const Arena::Mark mark(context.scratch);
  const auto take = [&] {
    return context.scratch.take({op.logits.dim(0)}, op.loss_sum.dtype(), "cross_entropy.rows");
  };
  const TensorView row_loss = take(), row_z = take();
  if (is_dry(context) || op.logits.dim(0) == 0) return;
  dispatch_logits(op.logits, op.dlogits, [&]<class T, class G>(TypeTag<T>, TypeTag<G>) {
    cross_entropy<T, G>(context, op, row_loss, row_z);
  });
}

}  // namespace moesaic
