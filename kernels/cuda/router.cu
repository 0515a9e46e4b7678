// The router: one warp per token. Scores are written first; then the k best are taken one after the
// other, each the largest key of the warp and, among equals, the lowest expert. "plain" looks at
// all experts for each; "registers" (f32, up to 1024 experts) first finds a bound that few experts
// reach, and falls back to the other where that fails: the choice is the same.
#include <cstdint>

#include "kernels/cuda/cpu_math.cuh"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/device_check.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/order_key.cuh"
#include "kernels/ops/router.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kQuad = 4;                // experts per access of the register path
constexpr int kCandidates = 2 * kWarp;  // that the register path can choose from
constexpr std::uint32_t kNobody = 0xffffffffU;

template <class A>
struct Args {
  A* scores;
  std::int32_t* topk;
  A* weights;
  A* cutoff;  // null: not wanted
  std::int32_t* counts;
  const A* logits;
  const A* bias;              // null: 0
  const std::int32_t* given;  // null: choose
  std::int64_t tokens;
  int experts, k;
  int num_groups, topk_groups;  // num_groups = 1: no limit
  bool softmax, renormalise;
  A route_scale;

  __device__ A biased(A s, int e) const { return bias == nullptr ? s : s + bias[e]; }
};

template <class A>
__device__ __forceinline__ A warp_max(A x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const A other = __shfl_xor_sync(0xffffffffU, x, offset);
    x = other > x ? other : x;
  }
  return x;
}

// Bit g is set for the groups with the largest sum of their two largest s + bias. `s` is the row of
// scores, which the warp has written.
template <class A>
__device__ std::uint64_t kept_groups(const Args<A>& op, const A* s) {
  using Keys = OrderKey<A>;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, size = op.experts / op.num_groups;
  order_key_t<A> key[kMaxGroups / kWarp] = {};  // of the groups lane, lane + 32
  for (int g = 0; g < op.num_groups; ++g) {
    A first = -INFINITY, second = -INFINITY;
    for (int e = g * size + lane; e < (g + 1) * size; e += kWarp) {
      A v = op.biased(s[e], e);
      if (!(v == v)) v = -INFINITY;
      second = fmax(second, fmin(first, v));
      first = fmax(first, v);
    }
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const A other_first = __shfl_xor_sync(0xffffffffU, first, offset),
              other_second = __shfl_xor_sync(0xffffffffU, second, offset);
      second = fmax(fmin(first, other_first), fmax(second, other_second));
      first = fmax(first, other_first);
    }
    const auto sum = Keys::of(size == 1 ? first : first + second);
#pragma unroll
    for (int i = 0; i < kMaxGroups / kWarp; ++i)
      if (g == i * kWarp + lane) key[i] = sum;
  }
  std::uint64_t mask = 0;
  for (int round = 0; round < op.topk_groups; ++round) {
    auto best = key[0];
    auto group = static_cast<std::uint32_t>(lane);
#pragma unroll
    for (int i = 1; i < kMaxGroups / kWarp; ++i) {
      if (key[i] > best) {
        best = key[i];
        group = static_cast<std::uint32_t>(i * kWarp + lane);
      }
    }
    warp_best(best, group);
    mask |= std::uint64_t{1} << group;
#pragma unroll
    for (int i = 0; i < kMaxGroups / kWarp; ++i)
      if (group == static_cast<std::uint32_t>(i * kWarp + lane)) key[i] = 0;
  }
  return mask;
}

template <class A>
__device__ __forceinline__ bool in_mask(const Args<A>& op, std::uint64_t mask, int e) {
  return op.num_groups == 1 || (mask >> (e / (op.experts / op.num_groups)) & 1U) != 0;
}

// Scores in memory only.
template <class A>
struct FromMemory {
  static constexpr int kResident = sizeof(A) == 8 ? 4 : 6;  // blocks of a multiprocessor at least
  static __device__ void score(const Args<A>& op, std::int64_t t, FromMemory&) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const A* logits = op.logits + t * op.experts;
    A* s = op.scores + t * op.experts;
    if (!op.softmax) {
      for (int e = lane; e < op.experts; e += kWarp)
        s[e] = as_cpu::sigmoid(logits[e]);
      return;
    }
    A largest = -INFINITY, sum = 0;
    for (int e = lane; e < op.experts; e += kWarp)
      largest = logits[e] > largest ? logits[e] : largest;
    largest = warp_max(largest);
    for (int e = lane; e < op.experts; e += kWarp) {
      const A v = as_cpu::exp(logits[e] - largest);
      s[e] = v;
      sum += v;
    }
    const A scale = A(1) / warp_sum(sum);
    for (int e = lane; e < op.experts; e += kWarp)
      s[e] *= scale;
  }
  // The best after (key, index) in the order of the choice; all lanes get it.
  static __device__ void next(const Args<A>& op,
                              const A* s,
                              std::uint64_t mask,
                              order_key_t<A>& key,
                              std::uint32_t& index) {
    order_key_t<A> best = 0;
    std::uint32_t best_index = kNobody;
    for (int e = static_cast<int>(threadIdx.x) % kWarp; e < op.experts; e += kWarp) {
      const auto candidate = OrderKey<A>::of(op.biased(s[e], e));
      const auto i = static_cast<std::uint32_t>(e);
      const bool later = candidate < key || (candidate == key && i > index);
      if (later && candidate > best && in_mask(op, mask, e)) {
        best = candidate;
        best_index = i;
      }
    }
    warp_best(best, best_index);
    key = best;
    index = best_index;
  }
  // Calls take(j, expert) for j = 0 .. k - 1 and returns the cutoff.
  template <class Take>
  __device__ A
  choose(const Args<A>& op, const A* s, std::uint64_t mask, std::uint64_t*, Take&& take) {
    order_key_t<A> key = ~order_key_t<A>(0);
    std::uint32_t index = 0;
    for (int j = 0; j < op.k; ++j) {
      next(op, s, mask, key, index);
      take(j, index);
    }
    if (op.cutoff == nullptr) return A(0);
    next(op, s, mask, key, index);
    return OrderKey<A>::value(key);
  }
};

// Scores of up to Quads * 128 experts in registers: lane l has the quads l, l + 32, ...
template <int Quads>
struct FromRegisters {
  static constexpr int kResident = Quads > 7 ? 4 : Quads > 4 ? 5 : 6;
  std::uint32_t key[Quads][kQuad];  // floats until choose() makes keys of them

  static __device__ void score(const Args<float>& op, std::int64_t t, FromRegisters& r) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const float* logits = op.logits + t * op.experts;
    float* s = op.scores + t * op.experts;
    float v[Quads][kQuad];
    float largest = -INFINITY;
#pragma unroll
    for (int q = 0; q < Quads; ++q) {
      const int e = (q * kWarp + lane) * kQuad;
      Vec<float, kQuad> x{{-INFINITY, -INFINITY, -INFINITY, -INFINITY}};
      if (e < op.experts) x = load<kQuad>(logits + e);
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        v[q][i] = x.v[i];
        largest = x.v[i] > largest ? x.v[i] : largest;
      }
    }
    if (op.softmax) {
      largest = warp_max(largest);
      float sum = 0;
#pragma unroll
      for (int q = 0; q < Quads; ++q) {
        const bool inside = (q * kWarp + lane) * kQuad < op.experts;
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
          v[q][i] = as_cpu::exp(v[q][i] - largest);
          if (inside) sum += v[q][i];
        }
      }
      const float scale = 1.0F / warp_sum(sum);
#pragma unroll
      for (int q = 0; q < Quads; ++q)
#pragma unroll
        for (int i = 0; i < kQuad; ++i)
          v[q][i] *= scale;
    } else {
#pragma unroll
      for (int q = 0; q < Quads; ++q)
#pragma unroll
        for (int i = 0; i < kQuad; ++i)
          v[q][i] = as_cpu::sigmoid(v[q][i]);
    }
#pragma unroll
    for (int q = 0; q < Quads; ++q) {
      const int e = (q * kWarp + lane) * kQuad;
      Vec<float, kQuad> out;
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        out.v[i] = v[q][i];
        r.key[q][i] = __float_as_uint(v[q][i]);
      }
      if (e < op.experts) store<kQuad>(s + e, out);
    }
  }

  // `candidates` [kCandidates]: shared memory of the warp.
  template <class Take>
  __device__ float choose(const Args<float>& op,
                          const float* s,
                          std::uint64_t mask,
                          std::uint64_t* candidates,
                          Take&& take) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int wanted = op.cutoff == nullptr ? op.k : op.k + 1;
    const std::uint32_t bound = wanted > kWarp ? 0 : nth_of_lanes(make_keys(op, mask), wanted);
    int mine = 0;
#pragma unroll
    for (int q = 0; q < Quads; ++q)
#pragma unroll
      for (int i = 0; i < kQuad; ++i)
        mine += key[q][i] >= bound ? 1 : 0;
    int upto = mine;  // inclusive over lanes
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int other = __shfl_up_sync(0xffffffffU, upto, offset);
      if (lane >= offset) upto += other;
    }
    const int total = __shfl_sync(0xffffffffU, upto, kWarp - 1);
    if (bound == 0 || total > kCandidates)
      return FromMemory<float>{}.choose(op, s, mask, nullptr, take);
    int at = upto - mine;
#pragma unroll
    for (int q = 0; q < Quads; ++q) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        if (key[q][i] < bound) continue;
        const auto expert = static_cast<std::uint32_t>((q * kWarp + lane) * kQuad + i);
        candidates[at++] = std::uint64_t{key[q][i]} << 32 | ~expert;
      }
    }
    __syncwarp();
    std::uint64_t first = lane < total ? candidates[lane] : 0;
    std::uint64_t second = lane + kWarp < total ? candidates[lane + kWarp] : 0;
    std::uint64_t best = 0;
    for (int j = 0; j < wanted; ++j) {
      best = warp_max_key(first > second ? first : second);
      if (j < op.k) take(j, ~static_cast<std::uint32_t>(best));
      if (first == best) first = 0;
      if (second == best) second = 0;
    }
    return OrderKey<float>::value(static_cast<std::uint32_t>(best >> 32));
  }

  // Turns the scores into keys, 0 for those that may not be chosen; returns the lane's largest.
  __device__ __forceinline__ std::uint32_t make_keys(const Args<float>& op, std::uint64_t mask) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    std::uint32_t largest = 0;
#pragma unroll
    for (int q = 0; q < Quads; ++q) {
      const int e = (q * kWarp + lane) * kQuad;
      const bool inside = e < op.experts;
      Vec<float, kQuad> b{};
      if (inside && op.bias != nullptr) b = load<kQuad>(op.bias + e);
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        const float s = __uint_as_float(key[q][i]);
        key[q][i] = inside && in_mask(op, mask, e + i)
                        ? OrderKey<float>::of(op.bias == nullptr ? s : s + b.v[i])
                        : 0;
        largest = max(largest, key[q][i]);
      }
    }
    return largest;
  }

  // The n-th largest of the lanes' values: at least n keys of the warp are as large.
  static __device__ __forceinline__ std::uint32_t nth_of_lanes(std::uint32_t value, int n) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int size = 2; size <= kWarp; size *= 2) {
#pragma unroll
      for (int distance = size / 2; distance > 0; distance /= 2) {
        const std::uint32_t other = __shfl_xor_sync(0xffffffffU, value, distance);
        const bool larger = ((lane & distance) == 0) == ((lane & size) == 0);
        value = larger ? max(value, other) : min(value, other);
      }
    }
    return __shfl_sync(0xffffffffU, value, n - 1);
  }
};

// The largest s + bias outside the given choice; NaN is nobody's largest.
template <class A>
__device__ A cutoff_of_given(const Args<A>& op, const A* s, const std::int32_t* choice) {
  A largest = -INFINITY;
  for (int e = static_cast<int>(threadIdx.x) % kWarp; e < op.experts; e += kWarp) {
    const A v = op.biased(s[e], e);
    bool chosen = false;
    for (int j = 0; j < op.k; ++j)
      chosen = chosen || choice[j] == e;
    if (!chosen && v > largest) largest = v;
  }
  return warp_max(largest);
}

// Weights of a token's choice, summed in its order, and the counts.
template <class A>
__device__ void weigh(const Args<A>& op, std::int64_t t, const A* s, const std::int32_t* choice) {
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
__global__ void __launch_bounds__(kThreads, Row::kResident) forward_kernel(const Args<A> op) {
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
Args<A> args_of(const RouterForward& op) {
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
