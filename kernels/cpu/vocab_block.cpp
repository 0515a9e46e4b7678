#include "kernels/ops/vocab_block.h"

#include <algorithm>

#include "kernels/cpu/rows.h"
#include "kernels/cpu/vocab_rows.h"
#include "kernels/ops/vocab_loss.h"

namespace moesaic {
namespace {

template <class T>
void block_sums(ThreadPool& pool, const VocabBlockSums& op) {
  using A = acc_t<T>;
  const std::int64_t n = op.logits.dim(1);
  pool.parallel_for(op.logits.dim(0), cpu::row_grain(n), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const auto of_row = cpu::exp_sum<A>(op.logits.as<T>() + r * n, n);
      op.sums.as<A>()[2 * r] = of_row.largest;
      op.sums.as<A>()[2 * r + 1] = of_row.sum;
    }
  });
}

// The log-sum-exp of row r over all blocks, in their order.
template <class A>
A log_sum_exp(const ConstTensorView& sums, std::int64_t r) {
  const std::int64_t rows = sums.dim(1);
  const auto part = [&](std::int64_t block) { return sums.as<A>() + (block * rows + r) * 2; };
  cpu::ExpSum<A> all{-std::numeric_limits<A>::infinity(), 0};
  for (std::int64_t b = 0; b < sums.dim(0); ++b)
    all.largest = std::max(all.largest, part(b)[0]);
  for (std::int64_t b = 0; b < sums.dim(0); ++b)
    all.sum += part(b)[1] * cpu::exp(part(b)[0] - all.largest);
  return cpu::log_of(all);
}

template <class T, class D>
void cross_entropy(ThreadPool& pool,
                   const VocabBlockCrossEntropy& op,
                   const TensorView& row_loss,
                   const TensorView& row_z) {
  using A = acc_t<T>;
  const std::int64_t n = op.logits.dim(1);
  const A factor = cpu::gradient_factor<A>(op);
  pool.parallel_for(op.logits.dim(0), cpu::row_grain(n), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const T* x = op.logits.as<T>() + r * n;
      D* d = op.dlogits.empty() ? nullptr : op.dlogits.as<D>() + r * n;
      const std::int32_t word = op.targets.as<std::int32_t>()[r];
      const bool ignored = word == kIgnoredTarget;
      MOESAIC_CHECK(ignored || (0 <= word && word < op.vocabulary()),
                    "target " + std::to_string(word) + " outside the vocabulary");
      const std::int64_t target = word - op.block * n;
      const bool here = !ignored && 0 <= target && target < n;
      const A w = ignored ? A(0) : op.weight.empty() ? A(1) : op.weight.as<A>()[r];
      const A lse = ignored ? A(0) : log_sum_exp<A>(op.sums, r);
      const A nll = here ? lse - static_cast<A>(x[target]) : A(0);
      row_loss.as<A>()[r] = w * nll;
      row_z.as<A>()[r] = here ? w * lse * lse : A(0);
      if (!op.logp.empty()) op.logp.as<A>()[r] = -nll;
      if (d == nullptr) continue;
      if (w == A(0)) {
        std::fill_n(d, n, D(A(0)));
        continue;
      }
      const A scale = factor * w, p_scale = scale * (A(1) + A(2) * static_cast<A>(op.z_coef) * lse);
      const A at_target = here ? p_scale * cpu::exp(static_cast<A>(x[target]) - lse) - scale : A(0);
#pragma omp simd
      for (std::int64_t v = 0; v < n; ++v)
        d[v] = D(p_scale * cpu::exp(static_cast<A>(x[v]) - lse));
      if (here) d[target] = D(at_target);
    }
  });
  cpu::add_rows<A>(row_loss, op.loss_sum);
  if (!op.z_sum.empty()) cpu::add_rows<A>(row_z, op.z_sum);
}

}  // namespace

void launch(CpuContext& context, const VocabBlockSums& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.logits.dtype(), [&]<class T>(TypeTag<T>) { block_sums<T>(pool, op); });
  });
}

void launch(CpuContext& context, const VocabBlockCrossEntropy& op) {
  const Arena::Mark mark(context.scratch);
  const auto take = [&] {
    return context.scratch.take({op.logits.dim(0)}, op.loss_sum.dtype(), "vocab_block.rows");
  };
  const TensorView row_loss = take(), row_z = take();
  context.stream.enqueue([op, row_loss, row_z, &pool = context.pool] {
    cpu::dispatch_logits(op.logits, op.dlogits, [&]<class T, class D>(TypeTag<T>, TypeTag<D>) {
      cross_entropy<T, D>(pool, op, row_loss, row_z);
    });
  });
}

}  // namespace moesaic
