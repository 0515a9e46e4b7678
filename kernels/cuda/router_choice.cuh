#pragma once
// Scores of a token and the choice of its experts, by one warp. "plain" (FromMemory) looks at all
// experts for each choice; "registers" (FromRegisters: f32, up to 1024 experts) first finds a bound
// that few experts reach, and falls back to the other where that fails: the choice is the same.
#include <cstdint>

#include "kernels/cuda/cpu_math.cuh"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/order_key.cuh"
#include "kernels/ops/router.h"

namespace moesaic::cuda {

constexpr int kQuad = 4;                // experts per access of the register path
constexpr int kCandidates = 2 * kWarp;  // that the register path can choose from
constexpr std::uint32_t kNobody = 0xffffffffU;

template <class A>
struct RouterArgs {
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
__device__ __forceinline__ A largest_of_lanes(A x) {
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
__device__ std::uint64_t kept_groups(const RouterArgs<A>& op, const A* s) {
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
__device__ __forceinline__ bool in_mask(const RouterArgs<A>& op, std::uint64_t mask, int e) {
  return op.num_groups == 1 || (mask >> (e / (op.experts / op.num_groups)) & 1U) != 0;
}

// Scores in memory only.
template <class A>
struct FromMemory {
  static constexpr int kResident = sizeof(A) == 8 ? 4 : 6;  // blocks of a multiprocessor at least
  static __device__ void score(const RouterArgs<A>& op, std::int64_t t, FromMemory&) {
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
    largest = largest_of_lanes(largest);
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
  static __device__ void next(const RouterArgs<A>& op,
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
  choose(const RouterArgs<A>& op, const A* s, std::uint64_t mask, std::uint64_t*, Take&& take) {
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

  static __device__ void score(const RouterArgs<float>& op, std::int64_t t, FromRegisters& r) {
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
      largest = largest_of_lanes(largest);
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
  __device__ float choose(const RouterArgs<float>& op,
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
  __device__ __forceinline__ std::uint32_t make_keys(const RouterArgs<float>& op,
                                                     std::uint64_t mask) {
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

}  // namespace moesaic::cuda
