// Auxiliary losses of the router and its gradient.
//
// The balance losses are linear in P, so each token sees one vector `pull` with loss_t = <pull,
// p_t> and dL/dp_t = pull; the sequence-wise part makes it depend on the document. The switch loss
// has a vector of its own because its probabilities are another function of the logits.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/math.h"
#include "kernels/cpu/stats.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/ops/router.h"

namespace moesaic {
namespace {

constexpr std::int64_t kTokenBlock = 64;  // tokens per partial sum of a loss; part of the bits

struct LossScratch {
  TensorView pull;         // [documents or 1, experts] statistics type
  TensorView switch_pull;  // [experts] statistics type
  TensorView counts;       // [documents or 1, experts] i32
};

LossScratch take_scratch(Arena& arena, const RouterLosses& losses, const ConstTensorView& scores) {
  const std::int64_t experts = scores.dim(1);
  const std::int64_t documents =
      losses.sequence_weight != 0 ? std::max<std::int64_t>(1, losses.cu.dim(0) - 1) : 1;
  return {arena.take({documents, experts}, scores.dtype(), "router_losses.pull"),
          arena.take({experts}, scores.dtype(), "router_losses.switch_pull"),
          arena.take({documents, experts}, DType::i32, "router_losses.counts")};
}

template <class A>
struct Terms {
  std::int64_t experts = 0;
  const A* pull = nullptr;         // null without sequence and global loss
  const A* switch_pull = nullptr;  // null without switch loss
  const std::int32_t* cu = nullptr;
  std::int64_t documents = 1;
  A z_weight = 0;  // per token

  bool needs_softmax() const { return switch_pull != nullptr || z_weight != A(0); }
  const A* pull_of(std::int64_t t) const {
    if (pull == nullptr || cu == nullptr) return pull;
    return pull +
           (std::upper_bound(cu, cu + documents + 1, static_cast<std::int32_t>(t)) - cu - 1) *
               experts;
  }
};

template <class A>
void document_pull(const RouterLosses& losses,
                   const ConstTensorView& topk,
                   std::int64_t begin,
                   std::int64_t end,
                   std::int64_t experts,
                   std::int32_t* counts,
                   A* pull) {
  const std::int64_t k = topk.dim(1), n = end - begin;
  double per_count = 0;
  if (losses.sequence_weight != 0) {
    std::fill_n(counts, experts, 0);
    const auto* chosen = topk.as<std::int32_t>();
    for (std::int64_t a = begin * k; a < end * k; ++a)
      ++counts[chosen[a]];
    const double share = static_cast<double>(n) * static_cast<double>(n) * static_cast<double>(k);
    if (n > 0)
      per_count = losses.sequence_weight * static_cast<double>(experts) /
                  (cpu::read_scalar(losses.documents) * share);
  }
  const bool global = losses.global_weight != 0;
  const double per_share =
      global ? losses.global_weight * static_cast<double>(experts) / cpu::read_scalar(losses.tokens)
             : 0.0;
  const A* f = global ? losses.frequency.as<A>() : nullptr;
  for (std::int64_t e = 0; e < experts; ++e) {
    double v = per_count != 0 ? per_count * counts[e] : 0.0;
    if (global) v += per_share * static_cast<double>(f[e]);
    pull[e] = static_cast<A>(v);
  }
}

template <class A>
void switch_pull(const RouterLosses& losses,
                 const ConstTensorView& topk,
                 std::int64_t experts,
                 std::int32_t* counts,
                 A* pull) {
  const std::int64_t tokens = topk.dim(0), k = topk.dim(1);
  const auto* chosen = topk.as<std::int32_t>();
  std::fill_n(counts, experts, 0);
  for (std::int64_t t = 0; t < tokens; ++t)
    ++counts[chosen[t * k]];
  const double scale =
      losses.switch_weight * static_cast<double>(experts) /
      (cpu::read_scalar(losses.tokens) * static_cast<double>(std::max<std::int64_t>(1, tokens)));
  for (std::int64_t e = 0; e < experts; ++e)
    pull[e] = static_cast<A>(scale * counts[e]);
}

template <class A>
Terms<A> make_terms(ThreadPool& pool,
                    const RouterLosses& losses,
                    const ConstTensorView& topk,
                    std::int64_t experts,
                    const LossScratch& scratch) {
  Terms<A> terms;
  terms.experts = experts;
  auto* counts = scratch.counts.as<std::int32_t>();
  if (losses.switch_weight != 0) {
    switch_pull(losses, topk, experts, counts, scratch.switch_pull.as<A>());
    terms.switch_pull = scratch.switch_pull.as<A>();
  }
  if (losses.z_weight != 0)
    terms.z_weight = static_cast<A>(losses.z_weight / cpu::read_scalar(losses.tokens));
  if (losses.sequence_weight == 0 && losses.global_weight == 0) return terms;
  const std::int64_t tokens = topk.dim(0);
  terms.pull = scratch.pull.as<A>();
  if (losses.sequence_weight != 0) {
    terms.cu = losses.cu.as<std::int32_t>();
    terms.documents = losses.cu.dim(0) - 1;
    MOESAIC_CHECK(terms.cu[0] == 0 && terms.cu[terms.documents] == tokens,
                  "cu must run from 0 to the number of tokens");
  }
  pool.parallel_for(terms.documents, 1, [&](std::int64_t d, std::int64_t) {
    const std::int64_t begin = terms.cu == nullptr ? 0 : terms.cu[d];
    const std::int64_t end = terms.cu == nullptr ? tokens : terms.cu[d + 1];
    document_pull(losses,
                  topk,
                  begin,
                  end,
                  experts,
                  counts + d * experts,
                  scratch.pull.as<A>() + d * experts);
  });
  return terms;
}

/// Softmax of a row without storing it: e^(l - max) / sum, log-sum-exp, and <pull, softmax>.
template <class A>
struct Softmax {
  A largest = -std::numeric_limits<A>::infinity();
  A inverse_sum = 0;
  A log_sum = 0;
  A pulled = 0;

  Softmax(const A* l, std::int64_t n, const A* pull) {
    A top = largest;
#pragma omp simd reduction(max : top)
    for (std::int64_t e = 0; e < n; ++e)
      top = l[e] > top ? l[e] : top;
    A sum = 0, dot = 0;
    const A* weight = pull == nullptr ? l : pull;  // without pull the dot product is not used
#pragma omp simd reduction(+ : sum, dot)
    for (std::int64_t e = 0; e < n; ++e) {
      const A v = cpu::exp(l[e] - top);
      sum += v;
      dot += v * weight[e];
    }
    largest = top;
    inverse_sum = A(1) / sum;
    log_sum = top + std::log(sum);
    pulled = pull == nullptr ? A(0) : dot * inverse_sum;
  }
  A at(A l) const {
    return cpu::exp(l - largest) * inverse_sum;
  }
};

/// sum of s and <pull, s> of a row.
template <class A>
struct Normalised {
  A sum = 0;
  A pulled = 0;  // <pull, s / sum>
  Normalised(const A* s, const A* pull, std::int64_t n) {
    A total = 0, dot = 0;
#pragma omp simd reduction(+ : total, dot)
    for (std::int64_t e = 0; e < n; ++e) {
      total += s[e];
      dot += s[e] * pull[e];
    }
    sum = total;
    pulled = dot / total;
  }
};

template <class A>
void loss_values(ThreadPool& pool,
                 const RouterLossForward& op,
                 const LossScratch& scratch,
                 double* partials) {
  const std::int64_t tokens = op.scores.dim(0), experts = op.scores.dim(1);
  const Terms<A> terms = make_terms<A>(pool, op.losses, op.topk, experts, scratch);
  const A* scores = op.scores.as<A>();
  const A* logits = op.logits.as<A>();
  pool.parallel_for(tokens, kTokenBlock, [&](std::int64_t begin, std::int64_t end) {
    double balance = 0, z = 0;
    for (std::int64_t t = begin; t < end; ++t) {
      if (const A* pull = terms.pull_of(t))
        balance += static_cast<double>(Normalised<A>(scores + t * experts, pull, experts).pulled);
      if (!terms.needs_softmax()) continue;
      const Softmax<A> q(logits + t * experts, experts, terms.switch_pull);
      balance += static_cast<double>(q.pulled);
      z += static_cast<double>(terms.z_weight) * static_cast<double>(q.log_sum) *
           static_cast<double>(q.log_sum);
    }
    partials[begin / kTokenBlock * 2] = balance;
    partials[begin / kTokenBlock * 2 + 1] = z;
  });
  double balance = 0, z = 0;
  for (std::int64_t b = 0; b * kTokenBlock < tokens; ++b) {
    balance += partials[b * 2];
    z += partials[b * 2 + 1];
  }
  const auto add = [](const TensorView& to, double v) {
    if (!to.empty()) *to.as<A>() = static_cast<A>(static_cast<double>(*to.as<A>()) + v);
  };
  add(op.balance_loss, balance);
  add(op.z_loss, z);
}

template <class A>
struct Backward {
  const RouterBackward& op;
  Terms<A> terms;
  std::int64_t experts = op.scores.dim(1);
  std::int64_t k = op.topk.dim(1);

  /// dL/ds of the chosen experts.
  void chosen_gradient(std::int64_t t, const A* s, const std::int32_t* topk, A* ds) const {
    const A* dw = op.dweights.as<A>() + t * k;
    const A* w = op.weights.as<A>() + t * k;
    const auto scale = static_cast<A>(op.route_scale);
    if (!op.renormalize || k == 1) {
      for (std::int64_t j = 0; j < k; ++j)
        ds[j] = scale * dw[j];
      return;
    }
    A sum = 0, dot = 0;
    for (std::int64_t j = 0; j < k; ++j) {
      sum += s[topk[j]];
      dot += dw[j] * w[j];
    }
    const A inverse = A(1) / (sum + A(1e-20));
    for (std::int64_t j = 0; j < k; ++j)
      ds[j] = (scale * dw[j] - dot) * inverse;
  }

  /// out = the part of dL/dlogits that every expert gets through the scores: `pull` through p,
  /// `shift` for softmax.
  void dense_part(A* out, const A* s, const A* pull, A shift) const {
    if (pull == nullptr) {
#pragma omp simd
      for (std::int64_t e = 0; e < experts; ++e)
        out[e] = -s[e] * shift;
      return;
    }
    const Normalised<A> p(s, pull, experts);
    const A inverse = A(1) / p.sum;
    const bool sigmoid = op.score == RouterScore::sigmoid;
#pragma omp simd
    for (std::int64_t e = 0; e < experts; ++e) {
      const A ds = (pull[e] - p.pulled) * inverse;
      out[e] = s[e] * (sigmoid ? ds * (A(1) - s[e]) : ds - shift);
    }
  }

  /// As dense_part, with the switch and z losses. One elementwise pass, because `out` may be the
  /// row of the logits.
  void dense_part_with_softmax(std::int64_t t, A* out, const A* s, const A* pull, A shift) const {
    const A* l = op.logits.as<A>() + t * experts;
    const Softmax<A> q(l, experts, terms.switch_pull);
    const Normalised<A> p(s, pull == nullptr ? s : pull, experts);
    const A inverse = A(1) / p.sum;
    const A slope = A(2) * terms.z_weight * q.log_sum - q.pulled;
    const bool sigmoid = op.score == RouterScore::sigmoid;
    // A vector that is not there is replaced by any other and multiplied by zero, so that the loop
    // has no branch.
    const A* balance = pull == nullptr ? s : pull;
    const A* switched = terms.switch_pull == nullptr ? s : terms.switch_pull;
    const A balance_scale = pull == nullptr ? A(0) : inverse;
    const A switch_scale = terms.switch_pull == nullptr ? A(0) : A(1);
#pragma omp simd
    for (std::int64_t e = 0; e < experts; ++e) {
      const A ds = (balance[e] - p.pulled) * balance_scale;
      const A own = s[e] * (sigmoid ? ds * (A(1) - s[e]) : ds - shift);
      out[e] = own + q.at(l[e]) * (switch_scale * switched[e] + slope);
    }
  }

  void row(std::int64_t t) const {
    const A* s = op.scores.as<A>() + t * experts;
    const auto* topk = op.topk.as<std::int32_t>() + t * k;
    A* out = op.dlogits.as<A>() + t * experts;
    A chosen[kMaxChoices];  // becomes dL/dlogit of the chosen; made before `out` may overwrite the
                            // scores
    chosen_gradient(t, s, topk, chosen);
    A shift = 0;
    for (std::int64_t j = 0; j < k; ++j) {
      const A sj = s[topk[j]];
      if (op.score == RouterScore::softmax) shift += chosen[j] * sj;
      chosen[j] *= op.score == RouterScore::softmax ? sj : sj * (A(1) - sj);
    }
    const A* pull = terms.pull_of(t);
    if (!terms.needs_softmax()) {
      dense_part(out, s, pull, shift);
    } else {
      dense_part_with_softmax(t, out, s, pull, shift);
    }
    for (std::int64_t j = 0; j < k; ++j)
      out[topk[j]] += chosen[j];
  }
};

}  // namespace

void launch(CpuContext& context, const RouterLossForward& op) {
  const Arena::Mark mark(context.scratch);
  const LossScratch scratch = take_scratch(context.scratch, op.losses, op.scores);
  const std::int64_t blocks = (op.scores.dim(0) + kTokenBlock - 1) / kTokenBlock;
  const TensorView partials = context.scratch.take(
      {std::max<std::int64_t>(1, blocks), 2}, DType::f64, "router_losses.partials");
  if (!op.losses.any()) return;
  context.stream.enqueue([op, scratch, partials, &pool = context.pool] {
    cpu::dispatch_stats(op.scores.dtype(), [&]<class A>(TypeTag<A>) {
      loss_values<A>(pool, op, scratch, partials.as<double>());
    });
  });
}

void launch(CpuContext& context, const RouterBackward& op) {
  const Arena::Mark mark(context.scratch);
  const LossScratch scratch = take_scratch(context.scratch, op.losses, op.scores);
  context.stream.enqueue([op, scratch, &pool = context.pool] {
    cpu::dispatch_stats(op.scores.dtype(), [&]<class A>(TypeTag<A>) {
      const Backward<A> backward{
          op, make_terms<A>(pool, op.losses, op.topk, op.scores.dim(1), scratch)};
      pool.parallel_for(op.scores.dim(0), 16, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t)
          backward.row(t);
      });
    });
  });
}

}  // namespace moesaic
