#pragma once
// What the auxiliary losses of the router need for their values and their gradients. As on the CPU,
// a loss that is linear in the scores is a vector `pull` over the experts (one per document with the
// sequence-wise loss), made by two small kernels.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/cuda/cpu_math.cuh"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/device_check.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/scalar.cuh"
#include "kernels/ops/router.h"

namespace moesaic::cuda {

constexpr int kLossThreads = 256;
constexpr int kLossTokens = kLossThreads / kWarp;  // of a block: a warp each

struct LossScratch {
  TensorView pull;           // [documents or 1, experts] statistics type
  TensorView switch_pull;    // [experts] statistics type
  TensorView counts;         // [documents or 1, experts] i32
  TensorView switch_counts;  // [experts] i32
};

inline LossScratch take_loss_scratch(Arena& arena,
                                     const RouterLosses& losses,
                                     const ConstTensorView& scores) {
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
struct RouterTerms {
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
__global__ void __launch_bounds__(kLossThreads)
    router_count_kernel(const RouterTerms<A> terms, const std::int32_t* topk) {
  const std::int64_t a = std::int64_t{blockIdx.x} * kLossThreads + threadIdx.x;
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
__global__ void __launch_bounds__(kLossThreads) router_pull_kernel(const RouterTerms<A> terms) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kLossThreads + threadIdx.x;
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
struct RowSoftmax {
  A largest, inverse_sum, log_sum, pulled;

  __device__ RowSoftmax(const A* l, int n, const A* pull) {
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
struct RowShares {
  A sum, pulled;

  __device__ RowShares(const A* s, const A* pull, int n) {
    A total = 0, dot = 0;
    for (int e = static_cast<int>(threadIdx.x) % kWarp; e < n; e += kWarp) {
      total += s[e];
      dot += s[e] * pull[e];
    }
    sum = warp_sum(total);
    pulled = warp_sum(dot) / sum;
  }
};

template <class A>
RouterTerms<A> make_terms(CudaContext& context,
                          const RouterLosses& losses,
                          const ConstTensorView& topk,
                          std::int64_t experts,
                          const LossScratch& scratch) {
  RouterTerms<A> terms;
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
    return static_cast<unsigned>(std::max<std::int64_t>(1, (n + kLossThreads - 1) / kLossThreads));
  };
  if (losses.sequence_weight != 0 || losses.switch_weight != 0) {
    router_count_kernel<A>
        <<<blocks(topk.numel()), kLossThreads, 0, stream>>>(terms, topk.as<std::int32_t>());
    check_launch("kernel router_losses: counts");
  }
  router_pull_kernel<A><<<blocks(terms.documents * experts), kLossThreads, 0, stream>>>(terms);
  check_launch("kernel router_losses: pull");
  return terms;
}

inline unsigned token_grid(std::int64_t tokens) {
  return static_cast<unsigned>((tokens + kLossTokens - 1) / kLossTokens);
}

}  // namespace moesaic::cuda
