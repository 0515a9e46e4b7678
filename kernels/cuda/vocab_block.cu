// Cross-entropy over a vocabulary in blocks: one pass for what the softmax needs of a block, one that writes the gradient, in
// place if asked to. Between them the ranks exchange two numbers a row.
#include <cstdint>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/device_check.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/vocab_rows.cuh"
#include "kernels/ops/vocab_block.h"
#include "kernels/ops/vocab_loss.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

template <class T, class A, int N, int Threads>
__global__ void __launch_bounds__(Threads, kResident<A, Threads>)
    sums_kernel(A* sums, const T* logits, std::int64_t rows, std::int64_t n) {
  for (std::int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    ExpSum<A> total;
    for_row<N, Threads>(
        logits + r * n, 0, n, [&](std::int64_t, const Vec<T, N>& xv) { total.add(xv); });
    total.template merge_block<Threads>();
    if (threadIdx.x == 0) {
      sums[2 * r] = total.largest;
      sums[2 * r + 1] = total.sum;
    }
  }
}

template <class T, class D, class A>
struct BlockArgs {
  const T* logits;
  D* dlogits;     // null: not wanted; may be logits
  const A* sums;  // [blocks, rows, 2]
  const std::int32_t* targets;
  const A* weight;  // null: 1
  A* row_loss;
  A* row_z;
  A* logp;  // null: not wanted
  Gradient<A> gradient;
  A z_coef;
  std::int64_t rows, n, blocks, first_word;

  // Over all blocks, in their order; every thread for itself.
  __device__ A log_sum_exp(std::int64_t r) const {
    ExpSum<A> all;
    for (std::int64_t b = 0; b < blocks; ++b)
      all.rescale(sums[(b * rows + r) * 2]);
    for (std::int64_t b = 0; b < blocks; ++b) {
      const A* part = sums + (b * rows + r) * 2;
      all.sum += part[1] * exponential(part[0] - all.reference());
    }
    return all.log();
  }
};

template <class T, class D, class A, int N, int Threads>
__global__ void __launch_bounds__(Threads, kResident<A, Threads>)
    block_cross_entropy_kernel(const BlockArgs<T, D, A> op) {
  for (std::int64_t r = blockIdx.x; r < op.rows; r += gridDim.x) {
    const T* x = op.logits + r * op.n;
    D* d = op.dlogits == nullptr ? nullptr : op.dlogits + r * op.n;
    const std::int32_t word = op.targets[r];
    const bool ignored = word == kIgnoredTarget;
    MOESAIC_DEVICE_CHECK(ignored || (0 <= word && word < op.blocks * op.n),
                         "a target is outside the vocabulary");
    const std::int64_t target = word - op.first_word;
    const bool here = !ignored && 0 <= target && target < op.n;
    const A w = ignored ? A(0) : op.weight == nullptr ? A(1) : op.weight[r];
    const A lse = ignored ? A(0) : op.log_sum_exp(r);
    if (threadIdx.x == 0) {
      const A nll = here ? lse - widen<A>(x[target]) : A(0);
      op.row_loss[r] = w * nll;
      op.row_z[r] = here ? w * lse * lse : A(0);
      if (op.logp != nullptr) op.logp[r] = -nll;
    }
    if (d == nullptr) continue;
    __syncthreads();  // in place: the target's logit has been read
    if (w == A(0)) {
      zero_row<N, Threads>(d, op.n);
      continue;
    }
    const A scale = op.gradient.factor() * w;
    const A p_scale = scale * (A(1) + A(2) * op.z_coef * lse);
    for_row<N, Threads>(x, 0, op.n, [&](std::int64_t v, const Vec<T, N>& xv) {
      Vec<D, N> out;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const A g = p_scale * exponential(widen<A>(xv.v[i]) - lse);
        out.v[i] = round_to<D>(here && v + i == target ? g - scale : g);
      }
      store<N>(d + v, out);
    });
  }
}

template <class T>
void block_sums(CudaContext& context, const VocabBlockSums& op) {
  using A = acc_t<T>;
  const auto* logits = reinterpret_cast<const device_t<T>*>(op.logits.as<T>());
  const std::int64_t rows = op.logits.dim(0), n = op.logits.dim(1);
  with_shape<T>(
      n,
      {logits},
      [&]<int N, int Threads>(std::integral_constant<int, N>,
                              std::integral_constant<int, Threads>) {
        sums_kernel<device_t<T>, A, N, Threads>
            <<<grid_for(context, rows, 2048 / Threads), Threads, 0, native_stream(context)>>>(
                op.sums.as<A>(), logits, rows, n);
      });
  check_launch("kernel vocab_block_sums");
}

template <class T, class G>
void cross_entropy(CudaContext& context,
                   const VocabBlockCrossEntropy& op,
                   const TensorView& row_loss,
                   const TensorView& row_z) {
  using A = acc_t<T>;
  using Args = BlockArgs<device_t<T>, device_t<G>, A>;
  const Args args{.logits = reinterpret_cast<const device_t<T>*>(op.logits.as<T>()),
                  .dlogits = reinterpret_cast<device_t<G>*>(op.dlogits.as<G>()),
                  .sums = op.sums.as<A>(),
                  .targets = op.targets.as<std::int32_t>(),
                  .weight = op.weight.as<A>(),
                  .row_loss = row_loss.as<A>(),
                  .row_z = row_z.as<A>(),
                  .logp = op.logp.as<A>(),
                  .gradient = {op.dlogits.empty() ? nullptr : op.divisor.as<A>(), op.grad_scale},
                  .z_coef = static_cast<A>(op.z_coef),
                  .rows = op.logits.dim(0),
                  .n = op.logits.dim(1),
                  .blocks = op.blocks(),
                  .first_word = op.block * op.logits.dim(1)};
  with_shape<T>(
      args.n,
      {args.logits, args.dlogits},
      [&]<int N, int Threads>(std::integral_constant<int, N>,
                              std::integral_constant<int, Threads>) {
        block_cross_entropy_kernel<device_t<T>, device_t<G>, A, N, Threads>
            <<<grid_for(context, args.rows, 2048 / Threads), Threads, 0, native_stream(context)>>>(
                args);
      });
  check_launch("kernel vocab_block_cross_entropy");
  sum_rows<A>(context, op.loss_sum, row_loss, op.z_sum, row_z);
}

}  // namespace

void launch(CudaContext& context, const VocabBlockSums& op) {
  if (is_dry(context) || op.logits.dim(0) == 0) return;
  dispatch_float(op.logits.dtype(), [&]<class T>(TypeTag<T>) { block_sums<T>(context, op); });
}

void launch(CudaContext& context, const VocabBlockCrossEntropy& op) {
  const Arena::Mark mark(context.scratch);
  const auto take = [&] {
    return context.scratch.take({op.logits.dim(0)}, op.loss_sum.dtype(), "vocab_block.rows");
  };
  const TensorView row_loss = take(), row_z = take();
  if (is_dry(context) || op.logits.dim(0) == 0) return;
  dispatch_logits(op.logits, op.dlogits, [&]<class T, class G>(TypeTag<T>, TypeTag<G>) {
    cross_entropy<T, G>(context, op, row_loss, row_z);
  });
}

}  // namespace moesaic
