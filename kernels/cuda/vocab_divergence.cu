// Divergences between two softmax rows: the log-sum-exp of both, a pass for the value, one for the
// gradient.
#include <cstdint>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/vocab_rows.cuh"
#include "kernels/ops/vocab_loss.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

template <class T, class D, class A>
struct DivergenceArgs {
  const T* logits;
  const T* teacher;
  D* dlogits;     // null: not wanted; may be logits
  const A* mask;  // null: 1
  A* row_loss;
  Gradient<A> gradient;
  std::int64_t rows, n;
};

// Calls f(v, elements of x, elements of y), as for_row() does.
template <int N, int Threads, class T, class F>
__device__ __forceinline__ void for_pairs(const T* x, const T* y, std::int64_t n, F&& f) {
  constexpr std::int64_t kStep = Threads * N;
  std::int64_t v = std::int64_t{threadIdx.x} * N;
  for (; v + kStep < n; v += 2 * kStep) {
    const auto x0 = load<N>(x + v), x1 = load<N>(x + v + kStep);
    const auto y0 = load<N>(y + v), y1 = load<N>(y + v + kStep);
    f(v, x0, y0);
    f(v + kStep, x1, y1);
  }
  if (v < n) f(v, load<N>(x + v), load<N>(y + v));
}

// d min(p, q) / dq.
template <class A>
__device__ __forceinline__ A share(A q, A p) {
  return q < p ? A(1) : (q > p ? A(0) : A(0.5));
}

template <class T, class D, class A, int N, int Threads, DivergenceKind Kind>
__global__ void __launch_bounds__(Threads, kResident<A, Threads>)
    divergence_kernel(const DivergenceArgs<T, D, A> op) {
  for (std::int64_t r = blockIdx.x; r < op.rows; r += gridDim.x) {
    const A w = op.mask == nullptr ? A(1) : op.mask[r];
    D* d = op.dlogits == nullptr ? nullptr : op.dlogits + r * op.n;
    if (w == A(0)) {
      if (threadIdx.x == 0) op.row_loss[r] = 0;
      if (d != nullptr) zero_row<N, Threads>(d, op.n);
      continue;
    }
    const T* x = op.logits + r * op.n;
    const T* y = op.teacher + r * op.n;
    const A lse_q = log_sum_exp<A, N, Threads>(x, op.n);
    const A lse_p = log_sum_exp<A, N, Threads>(y, op.n);
    A sum = 0, kept = 0;
    const auto add = [&](A log_q, A log_p) {
      if constexpr (Kind == DivergenceKind::forward_kl) {
        sum += exponential(log_p) * (log_p - log_q);
      } else if constexpr (Kind == DivergenceKind::reverse_kl) {
        sum += exponential(log_q) * (log_q - log_p);
      } else {
        const A q = exponential(log_q), p = exponential(log_p);
        sum += q < p ? q : p;
        kept += share(q, p) * q;
      }
    };
    for_pairs<N, Threads>(x, y, op.n, [&](std::int64_t, const Vec<T, N>& xv, const Vec<T, N>& yv) {
#pragma unroll
      for (int i = 0; i < N; ++i)
        add(widen<A>(xv.v[i]) - lse_q, widen<A>(yv.v[i]) - lse_p);
    });
    sum = row_sum<Threads>(sum);
    if constexpr (Kind == DivergenceKind::lk) kept = row_sum<Threads>(kept);
    if (threadIdx.x == 0) op.row_loss[r] = w * (Kind == DivergenceKind::lk ? -::log(sum) : sum);
    if (d == nullptr) continue;
    const A scale = op.gradient.factor() * w;
    const A lk_scale = scale / sum;
    const auto gradient = [&](A log_q, A log_p) {
      const A q = exponential(log_q);
      if constexpr (Kind == DivergenceKind::forward_kl) {
        return scale * (q - exponential(log_p));
      } else if constexpr (Kind == DivergenceKind::reverse_kl) {
        return scale * q * (log_q - log_p - sum);
      } else {
        return lk_scale * q * (kept - share(q, exponential(log_p)));
      }
    };
    for_pairs<N, Threads>(
        x, y, op.n, [&](std::int64_t v, const Vec<T, N>& xv, const Vec<T, N>& yv) {
          Vec<D, N> out;
#pragma unroll
          for (int i = 0; i < N; ++i)
            out.v[i] = round_to<D>(gradient(widen<A>(xv.v[i]) - lse_q, widen<A>(yv.v[i]) - lse_p));
          store<N>(d + v, out);
        });
  }
}

template <class T, class G>
void divergence(CudaContext& context, const VocabDivergence& op, const TensorView& row_loss) {
  using A = acc_t<T>;
  using Args = DivergenceArgs<device_t<T>, device_t<G>, A>;
  const Args args{.logits = reinterpret_cast<const device_t<T>*>(op.logits.as<T>()),
                  .teacher = reinterpret_cast<const device_t<T>*>(op.teacher.as<T>()),
                  .dlogits = reinterpret_cast<device_t<G>*>(op.dlogits.as<G>()),
                  .mask = op.mask.as<A>(),
                  .row_loss = row_loss.as<A>(),
                  .gradient = {op.dlogits.empty() ? nullptr : op.divisor.as<A>(), op.grad_scale},
                  .rows = op.logits.dim(0),
                  .n = op.logits.dim(1)};
  with_shape<T>(
      args.n,
      {args.logits, args.teacher, args.dlogits},
      [&]<int N, int Threads>(std::integral_constant<int, N>,
                              std::integral_constant<int, Threads>) {
        const auto start = [&](auto kernel) {
          kernel<<<grid_for(context, args.rows, 2048 / Threads),
                   Threads,
                   0,
                   native_stream(context)>>>(args);
        };
        using D = device_t<T>;
        using E = device_t<G>;
        switch (op.kind) {
          case DivergenceKind::forward_kl:
            return start(divergence_kernel<D, E, A, N, Threads, DivergenceKind::forward_kl>);
          case DivergenceKind::reverse_kl:
            return start(divergence_kernel<D, E, A, N, Threads, DivergenceKind::reverse_kl>);
          default:
            return start(divergence_kernel<D, E, A, N, Threads, DivergenceKind::lk>);
        }
      });
  check_launch("kernel vocab_divergence");
  sum_rows<A>(context, op.loss_sum, row_loss, {}, {});
}

}  // namespace

void launch(CudaContext& context, const VocabDivergence& op) {
  const Arena::Mark mark(context.scratch);
  const TensorView row_loss =
      context.scratch.take({op.logits.dim(0)}, op.loss_sum.dtype(), "vocab_divergence.rows");
  if (is_dry(context) || op.logits.dim(0) == 0) return;
  dispatch_logits(op.logits, op.dlogits, [&]<class T, class G>(TypeTag<T>, TypeTag<G>) {
    divergence<T, G>(context, op, row_loss);
  });
}

}  // namespace moesaic
