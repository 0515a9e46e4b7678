// Values of the auxiliary losses of the router: one warp per token, then sums in a fixed order.
#include <cstdint>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/router_terms.cuh"
#include "kernels/ops/router.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kTokenBlock = 64;       // tokens per partial sum of a loss; part of the bits
constexpr int kFinishThreads = 1024;  // of the one block that sums the losses

// token_losses [tokens, 2]: balance and z.
template <class A>
__global__ void __launch_bounds__(kLossThreads) value_kernel(double* token_losses,
                                                             const A* scores,
                                                             const A* logits,
                                                             const RouterTerms<A> terms) {
  const std::int64_t t = std::int64_t{blockIdx.x} * kLossTokens + threadIdx.x / kWarp;
  if (t >= terms.tokens) return;
  double balance = 0, z = 0;
  if (const A* pull = terms.pull_of(t))
    balance =
        static_cast<double>(RowShares<A>(scores + t * terms.experts, pull, terms.experts).pulled);
  if (terms.needs_softmax()) {
    const RowSoftmax<A> q(logits + t * terms.experts, terms.experts, terms.switch_pull);
    balance += static_cast<double>(q.pulled);
    z = static_cast<double>(terms.z_per_token()) * static_cast<double>(q.log_sum) *
        static_cast<double>(q.log_sum);
  }
  if (threadIdx.x % kWarp == 0) {
    token_losses[2 * t] = balance;
    token_losses[2 * t + 1] = z;
  }
}

// One thread per block of tokens, then one thread over the blocks; threadIdx.y: balance or z.
template <class A>
__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(A* balance_loss, A* z_loss, const double* token_losses, std::int64_t tokens) {
  __shared__ double partial[2][kFinishThreads / 2];
  const std::int64_t blocks = (tokens + kTokenBlock - 1) / kTokenBlock;
  double total = 0;
  for (std::int64_t first = 0; first < blocks; first += blockDim.x) {
    const std::int64_t begin = (first + threadIdx.x) * kTokenBlock;
    double sum = 0;
    for (std::int64_t t = begin; t < min(tokens, begin + kTokenBlock); ++t)
      sum += token_losses[2 * t + threadIdx.y];
    partial[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      const std::int64_t count = min(std::int64_t{blockDim.x}, blocks - first);
      for (std::int64_t b = 0; b < count; ++b)
        total += partial[threadIdx.y][b];
    }
    __syncthreads();
  }
  A* to = threadIdx.y == 0 ? balance_loss : z_loss;
  if (threadIdx.x == 0 && to != nullptr) *to = static_cast<A>(static_cast<double>(*to) + total);
}

template <class A>
void loss_values(CudaContext& context,
                 const RouterLossForward& op,
                 const LossScratch& scratch,
                 TensorView token_losses) {
  const auto terms = make_terms<A>(context, op.losses, op.topk, op.scores.dim(1), scratch);
  const auto stream = native_stream(context);
  value_kernel<A><<<token_grid(terms.tokens), kLossThreads, 0, stream>>>(
      token_losses.as<double>(), op.scores.as<A>(), op.logits.as<A>(), terms);
  check_launch("kernel router_loss_forward: tokens");
  finish_kernel<A><<<1, dim3(kFinishThreads / 2, 2), 0, stream>>>(
      op.balance_loss.as<A>(), op.z_loss.as<A>(), token_losses.as<double>(), terms.tokens);
  check_launch("kernel router_loss_forward: sums");
}

}  // namespace

void launch(CudaContext& context, const RouterLossForward& op) {
  const Arena::Mark mark(context.scratch);
  const LossScratch scratch = take_loss_scratch(context.scratch, op.losses, op.scores);
  const TensorView token_losses =
      context.scratch.take({op.scores.dim(0), 2}, DType::f64, "router_losses.tokens");
  if (is_dry(context) || !op.losses.any() || op.scores.dim(0) == 0) return;
  use_device(context.stream.device());
  if (op.scores.dtype() == DType::f64)
    return loss_values<double>(context, op, scratch, token_losses);
  loss_values<float>(context, op, scratch, token_losses);
}

}  // namespace moesaic
