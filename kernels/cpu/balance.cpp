#include "kernels/ops/balance.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "kernels/cpu/stats.h"
#include "kernels/cpu/thread_pool.h"

namespace moesaic {
namespace {

constexpr std::int64_t kExpertGrain =
    16;  // experts, and so columns of the scores, that one thread counts
constexpr std::int64_t kExactGroup = 8;  // experts whose margins are in scratch at a time

/// Bins of the required bias. Formed in f64: one value per step, and the bins of all micro-batches
/// must agree.
template <class A>
struct Bins {
  A low = 0;
  A per_width = 0;
  double width = 0;
  double low_exact = 0;

  Bins(const A* bias, std::int64_t experts, std::int64_t bins) {
    const auto [smallest, largest] = std::minmax_element(bias, bias + experts);
    low_exact = static_cast<double>(*smallest) - 1.0;
    width = (static_cast<double>(*largest) + 1.0 - low_exact) / static_cast<double>(bins);
    low = static_cast<A>(low_exact);
    per_width = static_cast<A>(1.0 / width);
  }
};

template <class A>
void count(ThreadPool& pool, const BalanceHistogram& op) {
  const std::int64_t tokens = op.scores.dim(0), experts = op.scores.dim(1),
                     bins = op.histogram.dim(1);
  const A* scores = op.scores.as<A>();
  const A* cutoff = op.cutoff.as<A>();
  auto* histogram = op.histogram.as<std::int32_t>();
  const Bins<A> b(op.bias.as<A>(), experts, bins);
  const A low = b.low, per_width = b.per_width, last = static_cast<A>(bins - 1);
  pool.parallel_for(experts, kExpertGrain, [=](std::int64_t begin, std::int64_t end) {
    std::int32_t bin[kExpertGrain];
    const std::int64_t n = end - begin;
    for (std::int64_t t = 0; t < tokens; ++t) {
      const A* s = scores + t * experts + begin;
      const A alpha = cutoff[t];
#pragma omp simd
      for (std::int64_t i = 0; i < n; ++i) {
        // Cut to the bins before the conversion, which then is a floor; NaN goes to bin 0.
        const A m = (alpha - s[i] - low) * per_width;
        const A at_most = m < last ? m : last;
        bin[i] = static_cast<std::int32_t>(m > A(0) ? at_most : A(0));
      }
      for (std::int64_t i = 0; i < n; ++i)
        ++histogram[(begin + i) * bins + bin[i]];
    }
  });
}

/// bias_j = value(j) minus the mean of all values, the mean in f64 and in order.
template <class A>
void centre(A* bias, const double* value, std::int64_t experts) {
  double sum = 0;
  for (std::int64_t e = 0; e < experts; ++e)
    sum += value[e];
  const double mean = sum / static_cast<double>(experts);
  for (std::int64_t e = 0; e < experts; ++e)
    bias[e] = static_cast<A>(value[e] - mean);
}

double quantile_of_histogram(
    const std::int32_t* h, std::int64_t bins, double q, double low, double width) {
  const double wanted = std::ceil(q);
  std::int64_t before = 0;
  for (std::int64_t m = 0; m < bins; ++m) {
    if (static_cast<double>(before + h[m]) >= wanted && h[m] > 0) {
      const double share = (q - static_cast<double>(before)) / static_cast<double>(h[m]);
      return low + (static_cast<double>(m) + std::clamp(share, 0.0, 1.0)) * width;
    }
    before += h[m];
  }
  return low + static_cast<double>(bins) * width;
}

template <class A>
void bias_from_histogram(ThreadPool& pool, const BalanceBiasFromHistogram& op, double* value) {
  const std::int64_t experts = op.bias.dim(0), bins = op.histogram.dim(1);
  const double q =
      cpu::read_scalar(op.tokens) * static_cast<double>(op.top_k) / static_cast<double>(experts);
  if (!(q > 0)) return;
  A* bias = op.bias.as<A>();
  const auto* histogram = op.histogram.as<std::int32_t>();
  const Bins<A> b(bias, experts, bins);
  pool.parallel_for(experts, 1, [&](std::int64_t e, std::int64_t) {
    value[e] = quantile_of_histogram(histogram + e * bins, bins, q, b.low_exact, b.width);
  });
  centre(bias, value, experts);
}

template <class A>
void exact_bias(ThreadPool& pool, const BalanceBiasExact& op, A* columns, double* value) {
  const std::int64_t tokens = op.margins.dim(0), experts = op.margins.dim(1);
  const A* margins = op.margins.as<A>();
  const std::int64_t q =
      std::min(tokens * op.top_k / experts, tokens - 1);  // floor(q) margins are larger
  for (std::int64_t e0 = 0; e0 < experts; e0 += kExactGroup) {
    pool.parallel_for(std::min(kExactGroup, experts - e0), 1, [&](std::int64_t i, std::int64_t) {
      A* column = columns + i * tokens;
      for (std::int64_t t = 0; t < tokens; ++t) {
        const A m = margins[t * experts + e0 + i];
        column[t] = m == m ? m : -std::numeric_limits<A>::infinity();
      }
      std::nth_element(column, column + q, column + tokens, std::greater<A>());
      value[e0 + i] = -static_cast<double>(column[q]);
    });
  }
  centre(op.bias.as<A>(), value, experts);
}

template <class I>
std::int64_t sum_of(const I* counts, std::int64_t n) {
  std::int64_t sum = 0;
  for (std::int64_t e = 0; e < n; ++e)
    sum += counts[e];
  return sum;
}

template <class A, class I>
void sign_bias(const BalanceBiasSign& op) {
  const std::int64_t experts = op.bias.dim(0);
  A* bias = op.bias.as<A>();
  const I* counts = op.counts.as<I>();
  const std::int64_t sum = sum_of(counts, experts);
  for (std::int64_t e = 0; e < experts; ++e) {
    const std::int64_t below = sum - experts * static_cast<std::int64_t>(counts[e]);
    if (below != 0) bias[e] += static_cast<A>(below > 0 ? op.gamma : -op.gamma);
  }
}

template <class A, class I>
void frequency(const BalanceFrequency& op) {
  const std::int64_t experts = op.frequency.dim(0);
  const I* counts = op.counts.as<I>();
  const std::int64_t sum = sum_of(counts, experts);
  A* f = op.frequency.as<A>();
  for (std::int64_t e = 0; e < experts; ++e) {
    f[e] = static_cast<A>(sum == 0 ? 1.0 / static_cast<double>(experts)
                                   : static_cast<double>(counts[e]) / static_cast<double>(sum));
  }
}

}  // namespace

void launch(CpuContext& context, const BalanceHistogram& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    cpu::dispatch_stats(op.scores.dtype(), [&]<class A>(TypeTag<A>) { count<A>(pool, op); });
  });
}

void launch(CpuContext& context, const BalanceBiasFromHistogram& op) {
  const Arena::Mark mark(context.scratch);
  const TensorView value = context.scratch.take({op.bias.dim(0)}, DType::f64, "balance_bias.value");
  context.stream.enqueue([op, value, &pool = context.pool] {
    if (cpu::is_set(op.skip)) return;
    cpu::dispatch_stats(op.bias.dtype(), [&]<class A>(TypeTag<A>) {
      bias_from_histogram<A>(pool, op, value.as<double>());
    });
  });
}

void launch(CpuContext& context, const BalanceMargins& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    cpu::dispatch_stats(op.scores.dtype(), [&]<class A>(TypeTag<A>) {
      const std::int64_t experts = op.scores.dim(1);
      pool.parallel_for(op.scores.dim(0), 64, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
          const A* s = op.scores.as<A>() + t * experts;
          A* m = op.margins.as<A>() + t * experts;
          const A alpha = op.cutoff.as<A>()[t];
#pragma omp simd
          for (std::int64_t e = 0; e < experts; ++e)
            m[e] = s[e] - alpha;
        }
      });
    });
  });
}

void launch(CpuContext& context, const BalanceBiasExact& op) {
  const Arena::Mark mark(context.scratch);
  const std::int64_t group = std::min(kExactGroup, op.bias.dim(0));
  const TensorView columns =
      context.scratch.take({group, op.margins.dim(0)}, op.margins.dtype(), "balance_bias.columns");
  const TensorView value = context.scratch.take({op.bias.dim(0)}, DType::f64, "balance_bias.value");
  context.stream.enqueue([op, columns, value, &pool = context.pool] {
    if (cpu::is_set(op.skip)) return;
    cpu::dispatch_stats(op.bias.dtype(), [&]<class A>(TypeTag<A>) {
      exact_bias<A>(pool, op, columns.as<A>(), value.as<double>());
    });
  });
}

void launch(CpuContext& context, const BalanceBiasSign& op) {
  context.stream.enqueue([op] {
    if (cpu::is_set(op.skip)) return;
    cpu::dispatch_stats(op.bias.dtype(), [&]<class A>(TypeTag<A>) {
      cpu::dispatch_int(op.counts.dtype(), [&]<class I>(TypeTag<I>) { sign_bias<A, I>(op); });
    });
  });
}

void launch(CpuContext& context, const AccumulateCounts& op) {
  context.stream.enqueue([op] {
    cpu::dispatch_int(op.counts.dtype(), [&]<class I>(TypeTag<I>) {
      const I* counts = op.counts.as<I>();
      auto* total = op.total.as<std::int64_t>();
      for (std::int64_t e = 0; e < op.total.dim(0); ++e)
        total[e] += counts[e];
    });
  });
}

void launch(CpuContext& context, const BalanceFrequency& op) {
  context.stream.enqueue([op] {
    if (cpu::is_set(op.skip)) return;
    cpu::dispatch_stats(op.frequency.dtype(), [&]<class A>(TypeTag<A>) {
      cpu::dispatch_int(op.counts.dtype(), [&]<class I>(TypeTag<I>) { frequency<A, I>(op); });
    });
  });
}

}  // namespace moesaic
