#include "kernels/ops/clip.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/split_master.h"
#include "kernels/cpu/stats.h"
#include "kernels/cpu/thread_pool.h"

namespace moesaic {
namespace {

constexpr std::int64_t kBlock = 4096;  // elements per partial sum; part of the bits

std::int64_t blocks_per_sum(const SumOfSquares& op) {
  return (op.x.numel() / op.sums() + kBlock - 1) / kBlock;
}

template <class T>
void sum_blocks(ThreadPool& pool, const SumOfSquares& op, double* block_sums) {
  const std::int64_t n = op.sums(), size = op.x.numel() / n, blocks = blocks_per_sum(op);
  const T* x = op.x.as<T>();
  pool.parallel_for(n * blocks, 8, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      const std::int64_t begin = i % blocks * kBlock;
      const std::int64_t count = std::min(kBlock, size - begin);
      const T* v = x + i / blocks * size + begin;
      double sum = 0;
#pragma omp simd reduction(+ : sum)
      for (std::int64_t c = 0; c < count; ++c) {
        const auto value = static_cast<double>(static_cast<acc_t<T>>(v[c]));
        sum += value * value;
      }
      block_sums[i] = sum;
    }
  });
  const auto* index = op.index.empty() ? nullptr : op.index.as<std::int32_t>();
  for (std::int64_t i = 0; i < n; ++i) {
    double& partial = op.partials.as<double>()[index == nullptr ? i : index[i]];
    partial = 0;
    for (std::int64_t b = 0; b < blocks; ++b)
      partial += block_sums[i * blocks + b];
  }
}

template <class A>
void clip_factor(const ClipFactor& op) {
  const auto* partials = op.partials.as<double>();
  double sum = 0;
  for (std::int64_t i = 0; i < op.partials.numel(); ++i)
    sum += partials[i];
  const double norm = std::sqrt(sum);
  *op.norm.as<double>() = norm;
  A* scalars = op.scalars.as<A>();
  A& factor = scalars[index_of(StepScalar::clip_factor)];
  if (!std::isfinite(norm)) {
    factor = 0;
    scalars[index_of(StepScalar::skip)] = 1;
    return;
  }
  factor = op.limit == 0 ? A(1) : static_cast<A>(std::min(1.0, op.limit / (norm + 1e-6)));
}

template <class A>
void average(ThreadPool& pool, const MovingAverage& op) {
  if (!op.scalars.empty() && op.scalars.as<A>()[index_of(StepScalar::skip)] != A(0)) return;
  A* mean = op.average.as<A>();
  const auto keep = static_cast<A>(op.decay);
  const auto take = static_cast<A>(1.0 - op.decay);
  // Both forms of a master go through one loop, so that they have the same bits.
  const auto move = [keep, take](A* to, const A* w, std::int64_t n) {
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i)
      to[i] = keep * to[i] + take * w[i];
  };
  if constexpr (std::is_same_v<A, float>) {
    if (!op.remainder.empty()) {
      const auto* weight = op.w.as<bf16>();
      const auto* remainder = op.remainder.as<std::uint16_t>();
      return pool.parallel_for(op.w.numel(), kBlock, [&](std::int64_t begin, std::int64_t end) {
        cpu::for_joined(weight, remainder, begin, end, [&](std::int64_t at, float* w, auto n) {
          move(mean + at, w, n);
        });
      });
    }
  }
  const A* w = op.w.as<A>();
  pool.parallel_for(op.w.numel(), kBlock, [&](std::int64_t begin, std::int64_t end) {
    move(mean + begin, w + begin, end - begin);
  });
}

}  // namespace

void launch(CpuContext& context, const SumOfSquares& op) {
  const Arena::Mark mark(context.scratch);
  const std::int64_t blocks = std::max<std::int64_t>(1, op.sums() * blocks_per_sum(op));
  const TensorView block_sums = context.scratch.take({blocks}, DType::f64, "sum_of_squares.blocks");
  context.stream.enqueue([op, block_sums, &pool = context.pool] {
    dispatch_float(op.x.dtype(),
                   [&]<class T>(TypeTag<T>) { sum_blocks<T>(pool, op, block_sums.as<double>()); });
  });
}

void launch(CpuContext& context, const ClipFactor& op) {
  context.stream.enqueue([op] {
    cpu::dispatch_stats(op.scalars.dtype(), [&]<class A>(TypeTag<A>) { clip_factor<A>(op); });
  });
}

void launch(CpuContext& context, const MovingAverage& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    cpu::dispatch_stats(op.average.dtype(), [&]<class A>(TypeTag<A>) { average<A>(pool, op); });
  });
}

}  // namespace moesaic
