// Auxiliary losses of the router and its gradient, one warp per token. As on the CPU, a loss that
// is linear in the scores is a vector `pull` over the experts (one per document with the
// sequence-wise loss), made by two small kernels first.
#include <cstdint>
#include <limits>

#include "kernels/cuda/cpu_math.cuh"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/device_check.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/scalar.cuh"
#include "kernels/ops/router.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kTokenBlock = 64;       // tokens per partial sum of a loss; part of the bits
constexpr int kFinishThreads = 1024;  // of the one block that sums the losses

struct LossScratch {
  TensorView pull;           // [documents or 1, experts] statistics type
  TensorView switch_pull;    // [experts] statistics type
  TensorView counts;         // [documents or 1, experts] i32
  TensorView switch_counts;  // [experts] i32
};

LossScratch take_scratch(Arena& arena, const RouterLosses& losses, const ConstTensorView& scores) {
  const std::int64_t experts = scores.dim(1);
  const std::int64_t documents =
      losses.sequence_weight != 0 ? std::max<std::int64_t>(1, losses.cu.dim(0) - 1) : 1;
  return {arena.take({documents, experts}, scores.dtype(), "router_losses.pull"),
          arena.take({experts}, scores.dtype(), "router_losses.switch_pull"),
          arena.take({documents, experts}, DType::i32, "router_losses.counts"),
          arena.take({experts}, DType::i32, "router_losses.switch_counts")};
}

// What kernels need of the losses; pointers that a loss does not need are null.
template <class A>
struct Terms {
  std::int64_t tokens = 0, documents = 1;
  int experts = 0, k = 0;
  A* pull = nullptr;
  A* switch_pull = nullptr;
  const std::int32_t* cu = nullptr;
  const A* frequency = nullptr;
  std::int32_t* counts = nullptr;
  std::int32_t* switch_counts = nullptr;
  double sequence_weight = 0, switch_weight = 0, global_weight = 0, z_weight = 0;
  Scalar step_tokens, step_documents;

  __host__ __device__ bool needs_softmax() const { return switch_weight != 0 || z_weight != 0; }
  __device__ std::int64_t document_of(std::int64_t t) const {
    if (cu == nullptr) return 0;
    std::int64_t low = 0, high = documents + 1;  // the first boundary beyond t
    while (low < high) {
      const std::int64_t middle = (low + high) / 2;
      if (cu[middle] <= t) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low - 1;
  }
  __device__ const A* pull_of(std::int64_t t) const {
    return pull == nullptr ? nullptr : pull + document_of(t) * experts;
  }
  __device__ A z_per_token() const {
    return z_weight == 0 ? A(0) : static_cast<A>(z_weight / step_tokens.read());
  }
};

template <class A>
__global__ void __launch_bounds__(kThreads)
    count_kernel(const Terms<A> terms, const std::int32_t* topk) {
  const std::int64_t a = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (a == 0 && terms.cu != nullptr) {
    MOESAIC_DEVICE_CHECK(terms.cu[0] == 0 && terms.cu[terms.documents] == terms.tokens,
                         "cu must run from 0 to the number of tokens");
  }
  if (a >= terms.tokens * terms.k) return;
  const std::int64_t t = a / terms.k;
  const std::int32_t expert = topk[a];
  if (terms.sequence_weight != 0)
    atomicAdd(&terms.counts[terms.document_of(t) * terms.experts + expert], 1);
  if (terms.switch_weight != 0 && a == t * terms.k) atomicAdd(&terms.switch_counts[expert], 1);
}

template <class A>
__global__ void __launch_bounds__(kThreads) pull_kernel(const Terms<A> terms) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= terms.documents * terms.experts) return;
  const std::int64_t d = i / terms.experts, e = i - d * terms.experts;
  const auto experts = static_cast<double>(terms.experts);
  if (terms.pull != nullptr) {
    double v = 0;
    if (terms.sequence_weight != 0) {
      const auto n = static_cast<double>(terms.cu[d + 1] - terms.cu[d]);
      const double share = n * n * static_cast<double>(terms.k);
      if (n > 0)
        v = terms.sequence_weight * experts / (terms.step_documents.read() * share) *
            terms.counts[i];
    }
    if (terms.global_weight != 0)
      v += terms.global_weight * experts / terms.step_tokens.read() *
           static_cast<double>(terms.frequency[e]);
    terms.pull[i] = static_cast<A>(v);
  }
  if (d == 0 && terms.switch_weight != 0) {
    const double scale =
        terms.switch_weight * experts /
        (terms.step_tokens.read() * static_cast<double>(max(std::int64_t{1}, terms.tokens)));
    terms.switch_pull[e] = static_cast<A>(scale * terms.switch_counts[e]);
  }
}

// Statistics of the softmax of a row and <pull, softmax>; the same in all lanes.
template <class A>
struct Softmax {
  A largest, inverse_sum, log_sum, pulled;

  __device__ Softmax(const A* l, int n, const A* pull) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    A top = -std::numeric_limits<A>::infinity();
    for (int e = lane; e < n; e += kWarp)
      top = l[e] > top ? l[e] : top;
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const A other = __shfl_xor_sync(0xffffffffU, top, offset);
      top = other > top ? other : top;
    }
    A sum = 0, dot = 0;
    for (int e = lane; e < n; e += kWarp) {
      const A v = as_cpu::exp(l[e] - top);
      sum += v;
      if (pull != nullptr) dot += v * pull[e];
    }
    sum = warp_sum(sum);
    largest = top;
    inverse_sum = A(1) / sum;
    log_sum = top + log(sum);
    pulled = pull == nullptr ? A(0) : warp_sum(dot) * inverse_sum;
  }
  __device__ A at(A l) const {
    return as_cpu::exp(l - largest) * inverse_sum;
  }
};

// Sum of s and <pull, s / sum> of a row; the same in all lanes.
template <class A>
struct Normalised {
  A sum, pulled;

  __device__ Normalised(const A* s, const A* pull, int n) {
    A total = 0, dot = 0;
    for (int e = static_cast<int>(threadIdx.x) % kWarp; e < n; e += kWarp) {
      total += s[e];
      dot += s[e] * pull[e];
    }
    sum = warp_sum(total);
    pulled = warp_sum(dot) / sum;
  }
};

// token_losses [tokens, 2]: balance and z.
template <class A>
__global__ void __launch_bounds__(kThreads)
    value_kernel(double* token_losses, const A* scores, const A* logits, const Terms<A> terms) {
  const std::int64_t t = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (t >= terms.tokens) return;
  double balance = 0, z = 0;
  if (const A* pull = terms.pull_of(t))
    balance =
        static_cast<double>(Normalised<A>(scores + t * terms.experts, pull, terms.experts).pulled);
  if (terms.needs_softmax()) {
    const Softmax<A> q(logits + t * terms.experts, terms.experts, terms.switch_pull);
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
struct BackwardArgs {
  A* dlogits;
  const A* dweights;
  const A* logits;
  const A* scores;
  const A* weights;
  const std::int32_t* topk;
  A route_scale;
  bool softmax, renormalise;
  Terms<A> terms;
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
__global__ void __launch_bounds__(kThreads) backward_kernel(const BackwardArgs<A> op) {
  __shared__ A chosen_of[kWarps][kMaxChoices];
  const Terms<A>& terms = op.terms;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, experts = terms.experts;
  const std::int64_t t = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (t >= terms.tokens) return;
  A* chosen = chosen_of[threadIdx.x / kWarp];
  const A* s = op.scores + t * experts;
  const A* l = op.logits + t * experts;
  const A* pull = terms.pull_of(t);
  A* out = op.dlogits + t * experts;
  const A shift = chosen_gradient(op, t, s, chosen);
  A pulled = 0, inverse = 0, largest = 0, scale = 0, slope = 0;
  if (pull != nullptr) {
    const Normalised<A> p(s, pull, experts);
    pulled = p.pulled;
    inverse = A(1) / p.sum;
  }
  if (terms.needs_softmax()) {
    const Softmax<A> q(l, experts, terms.switch_pull);
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
Terms<A> make_terms(CudaContext& context,
                    const RouterLosses& losses,
                    const ConstTensorView& topk,
                    std::int64_t experts,
                    const LossScratch& scratch) {
  Terms<A> terms;
  terms.tokens = topk.dim(0);
  terms.experts = static_cast<int>(experts);
  terms.k = static_cast<int>(topk.dim(1));
  terms.z_weight = losses.z_weight;
  if (!losses.tokens.empty()) terms.step_tokens = Scalar(losses.tokens);
  if (!losses.balances()) return terms;
  terms.sequence_weight = losses.sequence_weight;
  terms.switch_weight = losses.switch_weight;
  terms.global_weight = losses.global_weight;
  if (losses.sequence_weight != 0 || losses.global_weight != 0) terms.pull = scratch.pull.as<A>();
  if (losses.sequence_weight != 0) {
    terms.cu = losses.cu.as<std::int32_t>();
    terms.documents = losses.cu.dim(0) - 1;
    terms.step_documents = Scalar(losses.documents);
    terms.counts = scratch.counts.as<std::int32_t>();
    zero_tensor(scratch.counts, context.stream);
  }
  if (losses.global_weight != 0) terms.frequency = losses.frequency.as<A>();
  if (losses.switch_weight != 0) {
    terms.switch_pull = scratch.switch_pull.as<A>();
    terms.switch_counts = scratch.switch_counts.as<std::int32_t>();
    zero_tensor(scratch.switch_counts, context.stream);
  }
  const auto stream = native_stream(context);
  const auto blocks = [](std::int64_t n) {
    return static_cast<unsigned>(std::max<std::int64_t>(1, (n + kThreads - 1) / kThreads));
  };
  if (losses.sequence_weight != 0 || losses.switch_weight != 0) {
    count_kernel<A><<<blocks(topk.numel()), kThreads, 0, stream>>>(terms, topk.as<std::int32_t>());
    check_launch("kernel router_losses: counts");
  }
  pull_kernel<A><<<blocks(terms.documents * experts), kThreads, 0, stream>>>(terms);
  check_launch("kernel router_losses: pull");
  return terms;
}

unsigned token_grid(std::int64_t tokens) {
  return static_cast<unsigned>((tokens + kWarps - 1) / kWarps);
}

template <class A>
void loss_values(CudaContext& context,
                 const RouterLossForward& op,
                 const LossScratch& scratch,
                 TensorView token_losses) {
  const auto terms = make_terms<A>(context, op.losses, op.topk, op.scores.dim(1), scratch);
  const auto stream = native_stream(context);
  value_kernel<A><<<token_grid(terms.tokens), kThreads, 0, stream>>>(
      token_losses.as<double>(), op.scores.as<A>(), op.logits.as<A>(), terms);
  check_launch("kernel router_loss_forward: tokens");
  finish_kernel<A><<<1, dim3(kFinishThreads / 2, 2), 0, stream>>>(
      op.balance_loss.as<A>(), op.z_loss.as<A>(), token_losses.as<double>(), terms.tokens);
  check_launch("kernel router_loss_forward: sums");
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
    backward_kernel<A, kWide><<<grid, kThreads, 0, stream>>>(args);
  } else {
    backward_kernel<A, 1><<<grid, kThreads, 0, stream>>>(args);
  }
  check_launch("kernel router_backward");
}

}  // namespace

void launch(CudaContext& context, const RouterLossForward& op) {
  const Arena::Mark mark(context.scratch);
  const LossScratch scratch = take_scratch(context.scratch, op.losses, op.scores);
  const TensorView token_losses =
      context.scratch.take({op.scores.dim(0), 2}, DType::f64, "router_losses.tokens");
  if (is_dry(context) || !op.losses.any() || op.scores.dim(0) == 0) return;
  use_device(context.stream.device());
  if (op.scores.dtype() == DType::f64)
    return loss_values<double>(context, op, scratch, token_losses);
  loss_values<float>(context, op, scratch, token_losses);
}

void launch(CudaContext& context, const RouterBackward& op) {
  const Arena::Mark mark(context.scratch);
  const LossScratch scratch = take_scratch(context.scratch, op.losses, op.scores);
  if (is_dry(context) || op.scores.dim(0) == 0) return;
  use_device(context.stream.device());
  if (op.scores.dtype() == DType::f64) return backward<double>(context, op, scratch);
  backward<float>(context, op, scratch);
}

}  // namespace moesaic
