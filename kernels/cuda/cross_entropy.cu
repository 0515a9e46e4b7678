// Cross-entropy: a pass over the row forms the log-sum-exp with a running maximum, the next writes
// the gradient, in place if asked to. "kept": of a long row, shared memory keeps what it has room for
// between the passes, and the rest is little enough to be found in the L2 cache.
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/device_check.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/vocab_rows.cuh"
#include "kernels/ops/vocab_loss.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kKeepThreads = 1024;
constexpr std::int64_t kKeepBytes = 224 * 1024;  // of the 227 KiB that a block can have
constexpr std::int64_t kKeepRow = 64 * 1024;     // bytes of a row that is worth it

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
  std::int64_t kept;  // elements of a row that stay in shared memory: whole accesses of the block
};

template <class T, class D, class A, int N, int Threads, bool Keep>
__global__ void __launch_bounds__(Threads, kResident<A, Threads>)
    cross_entropy_kernel(const CrossEntropyArgs<T, D, A> op) {
  extern __shared__ __align__(16) unsigned char shared[];
  T* kept = reinterpret_cast<T*>(shared);  // a thread reads what it wrote itself
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
      ExpSum<A> total;
      for_row<N, Threads>(x, 0, op.n, [&](std::int64_t v, const Vec<T, N>& xv) {
        total.add(xv);
        if (Keep && v < op.kept) store<N>(kept + v, xv);
      });
      total.template merge_block<Threads>();  // a barrier: all have at_target
      lse = total.log();
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
    const auto write = [&](std::int64_t v, const Vec<T, N>& xv) {
      Vec<D, N> out;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const A g = p_scale * exponential(widen<A>(xv.v[i]) - lse);
        out.v[i] = round_to<D>(v + i == target ? g - scale : g);
      }
      store<N>(d + v, out);
    };
    if constexpr (Keep) for_row<N, Threads>(kept, 0, op.kept, write);
    for_row<N, Threads>(x, op.kept, op.n, write);
  }
}

template <class T, class D, class A, int N>
void start_keeping(CudaContext& context, CrossEntropyArgs<T, D, A> args) {
  constexpr std::int64_t kStep = kKeepThreads * N;
  constexpr std::int64_t kMost = kKeepBytes / static_cast<std::int64_t>(sizeof(T)) / kStep * kStep;
  args.kept = std::min(kMost, args.n / kStep * kStep);
  const auto kernel = cross_entropy_kernel<T, D, A, N, kKeepThreads, true>;
  const std::size_t bytes = static_cast<std::size_t>(args.kept) * sizeof(T);
  MOESAIC_CUDA_CALL(cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kMost * sizeof(T))));
  kernel<<<grid_for(context, args.rows, 1), kKeepThreads, bytes, native_stream(context)>>>(args);
  check_launch("kernel cross_entropy, rows kept");
}

// Rows of 16-byte accesses that the gradient has to read again.
bool keeps_rows(const CudaContext& context, const CrossEntropy& op) {
  const std::int64_t row_bytes =
      op.logits.dim(1) * static_cast<std::int64_t>(byte_size(op.logits.dtype()));
  return may_specialise(context) && op.logits.dtype() != DType::f64 && !op.dlogits.empty() &&
         row_bytes >= kKeepRow && row_bytes % 16 == 0 && is_aligned(op.logits.data(), 16) &&
         is_aligned(op.dlogits.data(), 16);
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
                  .n = op.logits.dim(1),
                  .kept = 0};
  with_shape<T>(
      args.n,
      {args.logits, args.dlogits},
      [&]<int N, int Threads>(std::integral_constant<int, N>,
                              std::integral_constant<int, Threads>) {
        if constexpr (N > 1 && Threads == kManyThreads && !std::is_same_v<T, double>) {
          if (keeps_rows(context, op))
            return start_keeping<device_t<T>, device_t<G>, A, N>(context, args);
        }
        cross_entropy_kernel<device_t<T>, device_t<G>, A, N, Threads, false>
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
  report_path(context, op, keeps_rows(context, op) ? "kept" : "plain");
  if (is_dry(context) || op.logits.dim(0) == 0) return;
  dispatch_logits(op.logits, op.dlogits, [&]<class T, class G>(TypeTag<T>, TypeTag<G>) {
    cross_entropy<T, G>(context, op, row_loss, row_z);
  });
}

}  // namespace moesaic
