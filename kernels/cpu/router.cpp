#include "kernels/ops/router.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/math.h"
#include "kernels/cpu/stats.h"
#include "kernels/cpu/thread_pool.h"

namespace moesaic {
namespace {

constexpr std::int64_t kTokenGrain = 16;
constexpr std::int64_t kExpertBlock = 32;  // experts looked at together by the selection

template <class A>
constexpr A kLowest = -std::numeric_limits<A>::infinity();

/// The k best of a stream of (index, value) offered by ascending index: best first, equal values by
/// the lower index.
template <class A>
struct Best {
  std::int32_t* index;
  A* value;
  std::int64_t k;
  std::int64_t size = 0;
  A rejected = kLowest<A>;  // the largest value that is not among the k best

  bool admits(A v) const { return size < k || v > value[k - 1]; }
  void reject(A v) { rejected = std::max(rejected, v); }
  void offer(std::int32_t i, A v) {
    if (!admits(v)) return reject(v);
    if (size == k) {
      reject(value[k - 1]);
    } else {
      ++size;
    }
    std::int64_t at = size - 1;
    for (; at > 0 && v > value[at - 1]; --at) {
      value[at] = value[at - 1];
      index[at] = index[at - 1];
    }
    value[at] = v;
    index[at] = i;
  }
};

/// s + bias of n experts, NaN as -infinity; returns the largest.
template <class A>
A biased_block(A* out, const A* s, const A* bias, std::int64_t n) {
  A largest = kLowest<A>;
#pragma omp simd reduction(max : largest)
  for (std::int64_t i = 0; i < n; ++i) {
    const A v = bias == nullptr ? s[i] : s[i] + bias[i];
    out[i] = v == v ? v : kLowest<A>;
    largest = out[i] > largest ? out[i] : largest;
  }
  return largest;
}

/// Offers the experts [begin, end) in blocks; a block in which nobody beats the worst of the best
/// is passed over.
template <class A>
void offer_range(Best<A>& best, const A* s, const A* bias, std::int64_t begin, std::int64_t end) {
  A v[kExpertBlock];
  for (std::int64_t e0 = begin; e0 < end; e0 += kExpertBlock) {
    const std::int64_t n = std::min(kExpertBlock, end - e0);
    const A largest = biased_block(v, s + e0, bias == nullptr ? nullptr : bias + e0, n);
    if (!best.admits(largest)) {
      best.reject(largest);
      continue;
    }
    for (std::int64_t i = 0; i < n; ++i)
      best.offer(static_cast<std::int32_t>(e0 + i), v[i]);
  }
}

/// Bit g is set for the groups with the largest sum of their two largest s + bias.
template <class A>
std::uint64_t kept_groups(
    const A* s, const A* bias, std::int64_t per_group, int num_groups, int keep) {
  std::int32_t index[kMaxGroups];
  A value[kMaxGroups];
  Best<A> groups{index, value, keep};
  for (int g = 0; g < num_groups; ++g) {
    std::int32_t two_index[2];
    A two[2];
    Best<A> largest{two_index, two, std::min<std::int64_t>(2, per_group)};
    offer_range(largest, s, bias, g * per_group, (g + 1) * per_group);
    const A sum = per_group == 1 ? two[0] : two[0] + two[1];
    groups.offer(g, sum == sum ? sum : kLowest<A>);
  }
  std::uint64_t mask = 0;
  for (int i = 0; i < keep; ++i)
    mask |= std::uint64_t{1} << index[i];
  return mask;
}

template <class A>
void score_row(A* s, const A* logit, std::int64_t experts, RouterScore score) {
  if (score == RouterScore::sigmoid) {
#pragma omp simd
    for (std::int64_t e = 0; e < experts; ++e)
      s[e] = cpu::sigmoid(logit[e]);
    return;
  }
  A largest = kLowest<A>;
#pragma omp simd reduction(max : largest)
  for (std::int64_t e = 0; e < experts; ++e)
    largest = logit[e] > largest ? logit[e] : largest;
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t e = 0; e < experts; ++e) {
    s[e] = cpu::exp(logit[e] - largest);
    sum += s[e];
  }
  const A scale = A(1) / sum;
#pragma omp simd
  for (std::int64_t e = 0; e < experts; ++e)
    s[e] *= scale;
}

/// The largest s + bias outside a given choice.
template <class A>
A cutoff_of_given(
    const A* s, const A* bias, std::int64_t experts, const std::int32_t* choice, std::int64_t k) {
  A largest = kLowest<A>;
  for (std::int64_t e = 0; e < experts; ++e) {
    const A v = bias == nullptr ? s[e] : s[e] + bias[e];
    if (v > largest && std::find(choice, choice + k, static_cast<std::int32_t>(e)) == choice + k)
      largest = v;
  }
  return largest;
}

template <class A>
struct Forward {
  const RouterForward& op;
  std::int64_t experts = op.logits.dim(1);
  std::int64_t k = op.topk.dim(1);
  const A* bias = op.bias.as<A>();

  /// Fills the row of topk (weights is workspace) and returns the cutoff.
  A choose(const A* s, std::int32_t* topk, A* workspace) const {
    Best<A> best{topk, workspace, k};
    if (!op.limits_groups()) {
      offer_range(best, s, bias, 0, experts);
      return best.rejected;
    }
    const std::int64_t per_group = experts / op.num_groups;
    const std::uint64_t mask = kept_groups(s, bias, per_group, op.num_groups, op.topk_groups);
    for (int g = 0; g < op.num_groups; ++g) {
      if ((mask >> g & 1U) != 0) offer_range(best, s, bias, g * per_group, (g + 1) * per_group);
    }
    return best.rejected;
  }

  A replay(const A* s, std::int32_t* topk, const std::int32_t* given) const {
    for (std::int64_t j = 0; j < k; ++j) {
      MOESAIC_CHECK(0 <= given[j] && given[j] < experts, "a given choice is not an expert number");
      topk[j] = given[j];
    }
    return op.cutoff.empty() ? A(0) : cutoff_of_given(s, bias, experts, topk, k);
  }

  void weigh(const A* s, const std::int32_t* topk, A* w) const {
    A sum = 0;
    for (std::int64_t j = 0; j < k; ++j)
      sum += s[topk[j]];
    // 1e-20 is in the released code; it is a normal float.
    const bool renormalise = op.renormalize && k > 1;
    const A den = renormalise ? sum + A(1e-20) : A(1);
    for (std::int64_t j = 0; j < k; ++j)
      w[j] = s[topk[j]] / den * static_cast<A>(op.route_scale);
  }

  void row(std::int64_t t) const {
    A* s = op.scores.as<A>() + t * experts;
    auto* topk = op.topk.as<std::int32_t>() + t * k;
    A* w = op.weights.as<A>() + t * k;
    score_row(s, op.logits.as<A>() + t * experts, experts, op.score);
    const A cut = op.given.empty() ? choose(s, topk, w)
                                   : replay(s, topk, op.given.as<std::int32_t>() + t * k);
    if (!op.cutoff.empty()) op.cutoff.as<A>()[t] = cut;
    weigh(s, topk, w);
  }
};

void count_choices(const RouterForward& op) {
  auto* counts = op.counts.as<std::int32_t>();
  const auto* topk = op.topk.as<std::int32_t>();
  std::fill_n(counts, op.counts.numel(), 0);
  for (std::int64_t a = 0; a < op.topk.numel(); ++a)
    ++counts[topk[a]];
}

void keep_first(const ExpertCapacity& op, std::int32_t* used) {
  const auto* topk = op.topk.as<std::int32_t>();
  auto* kept = op.kept.as<std::uint8_t>();
  std::fill_n(used, op.num_experts, 0);
  for (std::int64_t a = 0; a < op.topk.numel(); ++a)
    kept[a] = used[topk[a]]++ < op.capacity ? 1 : 0;
}

/// Lists the assignments by expert (offsets [experts + 1], list [assignments]), in order.
void list_by_expert(const ExpertCapacity& op, std::int32_t* offsets, std::int32_t* list) {
  const auto* topk = op.topk.as<std::int32_t>();
  const std::int64_t n = op.topk.numel();
  std::fill_n(offsets, op.num_experts + 1, 0);
  for (std::int64_t a = 0; a < n; ++a)
    ++offsets[topk[a] + 1];
  for (std::int64_t e = 0; e < op.num_experts; ++e)
    offsets[e + 1] += offsets[e];
  for (std::int64_t a = 0; a < n; ++a)
    list[offsets[topk[a]]++] = static_cast<std::int32_t>(a);
  // Each offset has moved to the end of its expert, which is where the next one starts.
  for (std::int64_t e = op.num_experts; e > 0; --e)
    offsets[e] = offsets[e - 1];
  offsets[0] = 0;
}

template <class A>
void keep_largest(ThreadPool& pool,
                  const ExpertCapacity& op,
                  std::int32_t* offsets,
                  std::int32_t* list) {
  list_by_expert(op, offsets, list);
  const A* w = op.weights.as<A>();
  auto* kept = op.kept.as<std::uint8_t>();
  const auto value = [w](std::int32_t a) { return w[a] == w[a] ? w[a] : kLowest<A>; };
  pool.parallel_for(op.num_experts, 1, [&](std::int64_t e, std::int64_t) {
    std::int32_t* begin = list + offsets[e];
    std::int32_t* end = list + offsets[e + 1];
    std::int32_t* cut = end - begin > op.capacity ? begin + op.capacity : end;
    if (cut != end) {
      std::nth_element(begin, cut, end, [&](std::int32_t a, std::int32_t b) {
        return value(a) != value(b) ? value(a) > value(b) : a < b;
      });
    }
    std::for_each(begin, cut, [&](std::int32_t a) { kept[a] = 1; });
    std::for_each(cut, end, [&](std::int32_t a) { kept[a] = 0; });
  });
}

}  // namespace

void launch(CpuContext& context, const RouterForward& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    cpu::dispatch_stats(op.logits.dtype(), [&]<class A>(TypeTag<A>) {
      const Forward<A> forward{op};
      pool.parallel_for(op.logits.dim(0), kTokenGrain, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t)
          forward.row(t);
      });
    });
    count_choices(op);
  });
}

void launch(CpuContext& context, const ExpertCapacity& op) {
  const Arena::Mark mark(context.scratch);
  const TensorView offsets =
      context.scratch.take({op.num_experts + 1}, DType::i32, "expert_capacity.offsets");
  const TensorView list =
      context.scratch.take({op.topk.numel()}, DType::i32, "expert_capacity.list");
  context.stream.enqueue([op, offsets, list, &pool = context.pool] {
    const auto* topk = op.topk.as<std::int32_t>();
    for (std::int64_t a = 0; a < op.topk.numel(); ++a) {
      MOESAIC_CHECK(0 <= topk[a] && topk[a] < op.num_experts,
                    "topk holds a number that is no expert");
    }
    auto* o = offsets.as<std::int32_t>();
    if (op.policy == DropPolicy::position) return keep_first(op, o);
    cpu::dispatch_stats(op.weights.dtype(), [&]<class A>(TypeTag<A>) {
      keep_largest<A>(pool, op, o, list.as<std::int32_t>());
    });
  });
}

}  // namespace moesaic
