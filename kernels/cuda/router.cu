// The router: one warp per token. Scores are written first; then the k best are taken one after the
// other, each the largest key of the warp and, among equals, the lowest expert (router_choice.cuh).
#include <cstdint>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/device_check.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/router_choice.cuh"
#include "kernels/ops/router.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;

// The largest s + bias outside the given choice; NaN is nobody's largest.
template <class A>
__device__ A cutoff_of_given(const RouterArgs<A>& op, const A* s, const std::int32_t* choice) {
  A largest = -INFINITY;
  for (int e = static_cast<int>(threadIdx.x) % kWarp; e < op.experts; e += kWarp) {
    const A v = op.biased(s[e], e);
    bool chosen = false;
    for (int j = 0; j < op.k; ++j)
      chosen = chosen || choice[j] == e;
    if (!chosen && v > largest) largest = v;
  }
  return largest_of_lanes(largest);
}

// Weights of a token's choice, summed in its order, and the counts.
template <class A>
__device__ void weigh(const RouterArgs<A>& op,
                      std::int64_t t,
                      const A* s,
                      const std::int32_t* choice) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  A sum = 0;
  if (op.renormalise) {
    for (int j0 = 0; j0 < op.k; j0 += kWarp) {
      const A mine = j0 + lane < op.k ? s[choice[j0 + lane]] : A(0);
      for (int j = 0; j < min(kWarp, op.k - j0); ++j)
        sum += __shfl_sync(0xffffffffU, mine, j);
    }
  }
  const A divisor = op.renormalise ? sum + A(1e-20) : A(1);
  for (int j = lane; j < op.k; j += kWarp) {
    const std::int32_t e = choice[j];
    op.topk[t * op.k + j] = e;
    op.weights[t * op.k + j] = s[e] / divisor * op.route_scale;
    atomicAdd(&op.counts[e], 1);
  }
}

template <class A, class Row>
__global__ void __launch_bounds__(kThreads, Row::kResident) forward_kernel(const RouterArgs<A> op) {
  __shared__ std::int32_t choices[kWarps][kMaxChoices];
  __shared__ std::uint64_t candidates[kWarps][kCandidates];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  std::int32_t* choice = choices[threadIdx.x / kWarp];
  for (std::int64_t t = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp; t < op.tokens;
       t += std::int64_t{gridDim.x} * kWarps) {
    const A* s = op.scores + t * op.experts;
    Row row;
    Row::score(op, t, row);
    __syncwarp();
    A cutoff = 0;
    if (op.given != nullptr) {
      for (int j = lane; j < op.k; j += kWarp) {
        choice[j] = op.given[t * op.k + j];
        MOESAIC_DEVICE_CHECK(0 <= choice[j] && choice[j] < op.experts,
                             "a given choice is not an expert number");
      }
      __syncwarp();
      if (op.cutoff != nullptr) cutoff = cutoff_of_given(op, s, choice);
    } else {
      const std::uint64_t mask = op.num_groups == 1 ? 0 : kept_groups(op, s);
      cutoff = row.choose(
          op, s, mask, candidates[threadIdx.x / kWarp], [&](int j, std::uint32_t expert) {
            if (lane == 0) choice[j] = static_cast<std::int32_t>(expert);
          });
      __syncwarp();
    }
    if (op.cutoff != nullptr && lane == 0) op.cutoff[t] = cutoff;
    weigh(op, t, s, choice);
    __syncwarp();  // the next token writes choice and candidates
  }
}

template <class A>
RouterArgs<A> args_of(const RouterForward& op) {
  const bool limited = op.given.empty() && op.limits_groups();
  return {.scores = op.scores.as<A>(),
          .topk = op.topk.as<std::int32_t>(),
          .weights = op.weights.as<A>(),
          .cutoff = op.cutoff.as<A>(),
          .counts = op.counts.as<std::int32_t>(),
          .logits = op.logits.as<A>(),
          .bias = op.bias.as<A>(),
          .given = op.given.as<std::int32_t>(),
          .tokens = op.logits.dim(0),
          .experts = static_cast<int>(op.logits.dim(1)),
          .k = static_cast<int>(op.topk.dim(1)),
          .num_groups = limited ? op.num_groups : 1,
          .topk_groups = op.topk_groups,
          .softmax = op.score == RouterScore::softmax,
          .renormalise = op.renormalize && op.topk.dim(1) > 1,
          .route_scale = static_cast<A>(op.route_scale)};
}

template <class A, class Row>
void forward(CudaContext& context, const RouterForward& op) {
  const std::int64_t blocks = (op.logits.dim(0) + kWarps - 1) / kWarps;
  forward_kernel<A, Row>
      <<<grid_for(context, blocks, 16), kThreads, 0, native_stream(context)>>>(args_of<A>(op));
  check_launch("kernel router_forward");
}

void from_registers(CudaContext& context, const RouterForward& op) {
  const std::int64_t quads = (op.logits.dim(1) + kWarp * kQuad - 1) / (kWarp * kQuad);
  if (quads <= 1) return forward<float, FromRegisters<1>>(context, op);
  if (quads <= 2) return forward<float, FromRegisters<2>>(context, op);
  if (quads <= 4) return forward<float, FromRegisters<4>>(context, op);
  if (quads <= 7) return forward<float, FromRegisters<7>>(context, op);
  forward<float, FromRegisters<8>>(context, op);
}

bool fits_registers(const RouterForward& op) {
  constexpr std::int64_t kMostExperts = std::int64_t{8} * kWarp * kQuad;
  const std::int64_t experts = op.logits.dim(1);
  return op.logits.dtype() == DType::f32 && experts <= kMostExperts && experts % kQuad == 0 &&
         is_aligned(op.logits.data(), 16) && is_aligned(op.scores.data(), 16) &&
         is_aligned(op.bias.data(), 16);
}

}  // namespace

void launch(CudaContext& context, const RouterForward& op) {
  const bool registers = may_specialise(context) && fits_registers(op);
  report_path(context, op, registers ? "registers" : "plain");
  if (is_dry(context)) return;
  use_device(context.stream.device());
  zero_tensor(op.counts, context.stream);
  if (op.logits.dim(0) == 0) return;
  if (registers) return from_registers(context, op);
  if (op.logits.dtype() == DType::f64) return forward<double, FromMemory<double>>(context, op);
  forward<float, FromMemory<float>>(context, op);
}

}  // namespace moesaic
