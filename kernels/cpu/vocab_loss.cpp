#include "kernels/ops/vocab_loss.h"

#include <cmath>

#include "kernels/cpu/rows.h"
#include "kernels/cpu/vocab_rows.h"

namespace moesaic {
namespace {

/// log sum exp of a row.
template <class A, class T>
A log_sum_exp(const T* x, std::int64_t n) {
  return cpu::log_of(cpu::exp_sum<A>(x, n));
}

template <class T, class D>
void cross_entropy(ThreadPool& pool,
                   const CrossEntropy& op,
                   const TensorView& row_loss,
                   const TensorView& row_z) {
  using A = acc_t<T>;
  const std::int64_t n = op.logits.dim(1);
  const A factor = cpu::gradient_factor<A>(op);
  pool.parallel_for(op.logits.dim(0), cpu::row_grain(n), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const T* x = op.logits.as<T>() + r * n;
      D* d = op.dlogits.empty() ? nullptr : op.dlogits.as<D>() + r * n;
      const std::int32_t target = op.targets.as<std::int32_t>()[r];
      const A w = target == kIgnoredTarget ? A(0) : op.weight.empty() ? A(1) : op.weight.as<A>()[r];
      A nll = 0, lse = 0;
      if (target != kIgnoredTarget) {
        MOESAIC_CHECK(0 <= target && target < n,
                      "target " + std::to_string(target) + " outside the vocabulary");
        lse = log_sum_exp<A>(x, n);
        nll = lse - static_cast<A>(x[target]);
      }
      row_loss.as<A>()[r] = w * nll;
      row_z.as<A>()[r] = w * lse * lse;
      if (!op.logp.empty()) op.logp.as<A>()[r] = -nll;
      if (d == nullptr) continue;
      if (w == A(0)) {
        std::fill_n(d, n, D(A(0)));
        continue;
      }
      const A scale = factor * w, p_scale = scale * (A(1) + A(2) * static_cast<A>(op.z_coef) * lse);
      const A at_target = p_scale * cpu::exp(static_cast<A>(x[target]) - lse) - scale;
#pragma omp simd
      for (std::int64_t v = 0; v < n; ++v)
        d[v] = D(p_scale * cpu::exp(static_cast<A>(x[v]) - lse));
      d[target] = D(at_target);
    }
  });
  cpu::add_rows<A>(row_loss, op.loss_sum);
  if (!op.z_sum.empty()) cpu::add_rows<A>(row_z, op.z_sum);
}

/// One row of a divergence: q = softmax(x), p = softmax(y). Writes scale dD/dx into d unless that is null.
template <class T, class D>
struct DivergenceRow {
  using A = acc_t<T>;
  const T* x;
  const T* y;
  std::int64_t n;
  A lse_q, lse_p, scale;
  D* d;

  A log_q(std::int64_t v) const { return static_cast<A>(x[v]) - lse_q; }
  A log_p(std::int64_t v) const { return static_cast<A>(y[v]) - lse_p; }

  A forward_kl() const {
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t v = 0; v < n; ++v)
      sum += cpu::exp(log_p(v)) * (log_p(v) - log_q(v));
    if (d != nullptr) {
#pragma omp simd
      for (std::int64_t v = 0; v < n; ++v)
        d[v] = D(scale * (cpu::exp(log_q(v)) - cpu::exp(log_p(v))));
    }
    return sum;
  }
  A reverse_kl() const {
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t v = 0; v < n; ++v)
      sum += cpu::exp(log_q(v)) * (log_q(v) - log_p(v));
    if (d != nullptr) {
#pragma omp simd
      for (std::int64_t v = 0; v < n; ++v)
        d[v] = D(scale * cpu::exp(log_q(v)) * (log_q(v) - log_p(v) - sum));
    }
    return sum;
  }
  // a = sum min(p, q), m_v = d min / d q_v:  d(-log a)/dx_v = -q_v (m_v - sum_u m_u q_u) / a.
  static A share(A q, A p) {
    return q < p ? A(1) : (q > p ? A(0) : A(0.5));
  }
  A lk() const {
    A accepted = 0, kept = 0;
#pragma omp simd reduction(+ : accepted, kept)
    for (std::int64_t v = 0; v < n; ++v) {
      const A q = cpu::exp(log_q(v)), p = cpu::exp(log_p(v));
      accepted += q < p ? q : p;
      kept += share(q, p) * q;
    }
    if (d != nullptr) {
      const A f = scale / accepted;
#pragma omp simd
      for (std::int64_t v = 0; v < n; ++v) {
        const A q = cpu::exp(log_q(v)), p = cpu::exp(log_p(v));
        d[v] = D(f * q * (kept - share(q, p)));
      }
    }
    return -std::log(accepted);
  }
  A run(DivergenceKind kind) const {
    if (kind == DivergenceKind::forward_kl) return forward_kl();
    return kind == DivergenceKind::reverse_kl ? reverse_kl() : lk();
  }
};

template <class T, class D>
void divergence(ThreadPool& pool, const VocabDivergence& op, const TensorView& row_loss) {
  using A = acc_t<T>;
  const std::int64_t n = op.logits.dim(1);
  const A factor = cpu::gradient_factor<A>(op);
  pool.parallel_for(op.logits.dim(0), cpu::row_grain(n), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const A w = op.mask.empty() ? A(1) : op.mask.as<A>()[r];
      D* d = op.dlogits.empty() ? nullptr : op.dlogits.as<D>() + r * n;
      if (w == A(0)) {
        row_loss.as<A>()[r] = 0;
        if (d != nullptr) std::fill_n(d, n, D(A(0)));
        continue;
      }
      const T* x = op.logits.as<T>() + r * n;
      const T* y = op.teacher.as<T>() + r * n;
      const DivergenceRow<T, D> row{
          x, y, n, log_sum_exp<A>(x, n), log_sum_exp<A>(y, n), factor * w, d};
      row_loss.as<A>()[r] = w * row.run(op.kind);
    }
  });
  cpu::add_rows<A>(row_loss, op.loss_sum);
}

}  // namespace

void launch(CpuContext& context, const CrossEntropy& op) {
  const Arena::Mark mark(context.scratch);
  const std::int64_t rows = op.logits.dim(0);
  const TensorView row_loss =
      context.scratch.take({rows}, op.loss_sum.dtype(), "cross_entropy.rows");
  const TensorView row_z = context.scratch.take({rows}, op.loss_sum.dtype(), "cross_entropy.rows");
  context.stream.enqueue([op, row_loss, row_z, &pool = context.pool] {
    cpu::dispatch_logits(op.logits, op.dlogits, [&]<class T, class D>(TypeTag<T>, TypeTag<D>) {
      cross_entropy<T, D>(pool, op, row_loss, row_z);
    });
  });
}

void launch(CpuContext& context, const VocabDivergence& op) {
  const Arena::Mark mark(context.scratch);
  const TensorView row_loss =
      context.scratch.take({op.logits.dim(0)}, op.loss_sum.dtype(), "vocab_divergence.rows");
  context.stream.enqueue([op, row_loss, &pool = context.pool] {
    cpu::dispatch_logits(op.logits, op.dlogits, [&]<class T, class D>(TypeTag<T>, TypeTag<D>) {
      divergence<T, D>(pool, op, row_loss);
    });
  });
}

}  // namespace moesaic
