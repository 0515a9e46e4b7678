// Gradient of the router: one warp per token.
#include <cstdint>

#include "kernels/cuda/cpu_math.cuh"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/router_terms.cuh"
#include "kernels/ops/router.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

template <class A>
struct BackwardArgs {
  A* dlogits;
  const A* dweights;
  const A* logits;
  const A* scores;
  const A* weights;
  const std::int32_t* topk;
  A route_scale;
  bool softmax, renormalise;
  RouterTerms<A> terms;
};

// chosen[j] = dL/dlogit_j of the chosen experts through the weights; returns sum_j dL/ds_j s_j,
// which softmax needs. Sums run in the order of the choice.
template <class A>
__device__ A chosen_gradient(const BackwardArgs<A>& op, std::int64_t t, const A* s, A* chosen) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, k = op.terms.k;
  const std::int32_t* topk = op.topk + t * k;
  const A* dw = op.dweights + t * k;
  const A* w = op.weights + t * k;
  A dot = 0, inverse = 1;
  if (op.renormalise) {
    A sum = 0;
    for (int j0 = 0; j0 < k; j0 += kWarp) {
      const bool mine = j0 + lane < k;
      const A own = mine ? s[topk[j0 + lane]] : A(0);
      const A product = mine ? dw[j0 + lane] * w[j0 + lane] : A(0);
      for (int j = 0; j < min(kWarp, k - j0); ++j) {
        sum += __shfl_sync(0xffffffffU, own, j);
        dot += __shfl_sync(0xffffffffU, product, j);
      }
    }
    inverse = A(1) / (sum + A(1e-20));
  }
  A shift = 0;
  for (int j0 = 0; j0 < k; j0 += kWarp) {
    const int j = j0 + lane;
    A product = 0;
    if (j < k) {
      const A own = s[topk[j]];
      const A ds =
          op.renormalise ? (op.route_scale * dw[j] - dot) * inverse : op.route_scale * dw[j];
      product = ds * own;
      chosen[j] = op.softmax ? product : ds * (own * (A(1) - own));
    }
    if (!op.softmax) continue;
    for (int i = 0; i < min(kWarp, k - j0); ++i)
      shift += __shfl_sync(0xffffffffU, product, i);
  }
  return shift;
}

// out[topk[j]] += chosen[j], in the order of j where a given choice names an expert twice.
template <class A>
__device__ void add_chosen(A* out, const std::int32_t* topk, const A* chosen, int k) {
  const unsigned lane = threadIdx.x % kWarp;
  for (int j0 = 0; j0 < k; j0 += kWarp) {
    const int j = j0 + static_cast<int>(lane);
    const std::int32_t expert = j < k ? topk[j] : -1;
    const unsigned peers = __match_any_sync(0xffffffffU, expert);
    const unsigned turn = j < k ? __popc(peers & ((1U << lane) - 1U)) : 0;
    const unsigned turns = __reduce_max_sync(0xffffffffU, turn) + 1;
    for (unsigned i = 0; i < turns; ++i) {
      if (j < k && turn == i) out[expert] += chosen[j];
      __syncwarp();
    }
  }
}

// No pointer is __restrict__: dlogits may be scores or logits. Each thread reads what it overwrites
// itself, after all sums over the row.
template <class A, int N>
__global__ void __launch_bounds__(kLossThreads) backward_kernel(const BackwardArgs<A> op) {
  __shared__ A chosen_of[kLossTokens][kMaxChoices];
  const RouterTerms<A>& terms = op.terms;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, experts = terms.experts;
  const std::int64_t t = std::int64_t{blockIdx.x} * kLossTokens + threadIdx.x / kWarp;
  if (t >= terms.tokens) return;
  A* chosen = chosen_of[threadIdx.x / kWarp];
  const A* s = op.scores + t * experts;
  const A* l = op.logits + t * experts;
  const A* pull = terms.pull_of(t);
  A* out = op.dlogits + t * experts;
  const A shift = chosen_gradient(op, t, s, chosen);
  A pulled = 0, inverse = 0, largest = 0, scale = 0, slope = 0;
  if (pull != nullptr) {
    const RowShares<A> p(s, pull, experts);
    pulled = p.pulled;
    inverse = A(1) / p.sum;
  }
  if (terms.needs_softmax()) {
    const RowSoftmax<A> q(l, experts, terms.switch_pull);
    largest = q.largest;
    scale = q.inverse_sum;
    slope = A(2) * terms.z_per_token() * q.log_sum - q.pulled;
  }
  __syncwarp();  // chosen is complete, the choice's scores are read
  for (int e = lane * N; e < experts; e += kWarp * N) {
    const auto sv = load<N>(s + e);
    Vec<A, N> lv{};
    if (terms.needs_softmax()) lv = load<N>(l + e);
    Vec<A, N> d;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const A ds = pull == nullptr ? A(0) : (pull[e + i] - pulled) * inverse;
      d.v[i] = sv.v[i] * (op.softmax ? ds - shift : ds * (A(1) - sv.v[i]));
      if (terms.needs_softmax()) {
        const A switched = terms.switch_pull == nullptr ? A(0) : terms.switch_pull[e + i];
        d.v[i] += as_cpu::exp(lv.v[i] - largest) * scale * (switched + slope);
      }
    }
    store<N>(out + e, d);
  }
  __syncwarp();
  add_chosen(out, op.topk + t * terms.k, chosen, terms.k);
}

template <class A>
void backward(CudaContext& context, const RouterBackward& op, const LossScratch& scratch) {
  const BackwardArgs<A> args{
      .dlogits = op.dlogits.as<A>(),
      .dweights = op.dweights.as<A>(),
      .logits = op.logits.as<A>(),
      .scores = op.scores.as<A>(),
      .weights = op.weights.as<A>(),
      .topk = op.topk.as<std::int32_t>(),
      .route_scale = static_cast<A>(op.route_scale),
      .softmax = op.score == RouterScore::softmax,
      .renormalise = op.renormalize && op.topk.dim(1) > 1,
      .terms = make_terms<A>(context, op.losses, op.topk, op.scores.dim(1), scratch)};
  constexpr int kWide = 16 / sizeof(A);
  const unsigned grid = token_grid(op.scores.dim(0));
  const auto stream = native_stream(context);
  if (op.scores.dim(1) % kWide == 0 && is_aligned(op.dlogits.data(), 16) &&
      is_aligned(op.scores.data(), 16) && is_aligned(op.logits.data(), 16)) {
    backward_kernel<A, kWide><<<grid, kLossThreads, 0, stream>>>(args);
  } else {
    backward_kernel<A, 1><<<grid, kLossThreads, 0, stream>>>(args);
  }
  check_launch("kernel router_backward");
}

}  // namespace

void launch(CudaContext& context, const RouterBackward& op) {
  const Arena::Mark mark(context.scratch);
  const LossScratch scratch = take_loss_scratch(context.scratch, op.losses, op.scores);
  if (is_dry(context) || op.scores.dim(0) == 0) return;
  use_device(context.stream.device());
  if (op.scores.dtype() == DType::f64) return backward<double>(context, op, scratch);
  backward<float>(context, op, scratch);
}

}  // namespace moesaic
