#include "kernels/ops/permute.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "kernels/cpu/stats.h"
#include "kernels/cpu/thread_pool.h"

namespace moesaic {
namespace {

constexpr std::int64_t kRowGrain = 16;
constexpr std::int64_t kColumns =
    256;  // columns summed at a time, so that the sum stays in the nearest cache

std::int64_t count_or(const ConstTensorView& count, std::int64_t all) {
  return count.empty() ? all : *count.as<std::int32_t>();
}

/// A stable counting sort; `cursor` [experts] is workspace.
void make_plan(const DispatchPlan& op, std::int32_t* cursor) {
  const std::int64_t experts = op.offsets.dim(0) - 1, k = op.topk.dim(1),
                     assignments = op.topk.numel();
  const auto* topk = op.topk.as<std::int32_t>();
  const auto* kept = op.kept.as<std::uint8_t>();
  auto* offsets = op.offsets.as<std::int32_t>();
  auto* row_of_assignment = op.row_of_assignment.as<std::int32_t>();
  auto* token_of_row = op.token_of_row.as<std::int32_t>();
  const std::int64_t used = count_or(op.token_count, op.topk.dim(0)) * k,
                     rows = op.token_of_row.dim(0);
  const auto takes_part = [&](std::int64_t a) {
    return a < used && topk[a] >= 0 && (kept == nullptr || kept[a] != 0);
  };

  std::fill_n(offsets, experts + 1, 0);
  for (std::int64_t a = 0; a < assignments; ++a) {
    MOESAIC_CHECK(a >= used || (-1 <= topk[a] && topk[a] < experts),
                  "topk holds a number that is no expert");
    if (takes_part(a)) ++offsets[topk[a] + 1];
  }
  for (std::int64_t e = 0; e < experts; ++e) {
    offsets[e + 1] += offsets[e];
    cursor[e] = offsets[e];
  }
  for (std::int64_t t = 0; t * k < assignments; ++t) {
    for (std::int64_t a = t * k; a < (t + 1) * k; ++a) {
      std::int32_t row = takes_part(a) ? cursor[topk[a]]++ : -1;
      if (row >= rows) row = -1;
      row_of_assignment[a] = row;
      if (row >= 0) token_of_row[row] = static_cast<std::int32_t>(t);
    }
  }
  const std::int64_t missing = std::max<std::int64_t>(0, offsets[experts] - rows);
  MOESAIC_CHECK(missing == 0 || !op.overflow.empty(),
                fmt::format("{} rows cannot hold {} assignments", rows, offsets[experts]));
  if (!op.overflow.empty()) *op.overflow.as<std::int32_t>() = static_cast<std::int32_t>(missing);
  for (std::int64_t e = 0; missing > 0 && e <= experts; ++e)
    offsets[e] = std::min(offsets[e], static_cast<std::int32_t>(rows));
  std::fill(token_of_row + offsets[experts], token_of_row + rows, -1);
}

void gather(ThreadPool& pool, const GatherRows& op) {
  const std::size_t bytes = byte_size(op.x.dtype()) * static_cast<std::size_t>(op.x.dim(1));
  const auto* token_of_row = op.token_of_row.as<std::int32_t>();
  const std::byte* x = op.x.data();
  std::byte* y = op.y.data();
  pool.parallel_for(
      count_or(op.num_rows, op.y.dim(0)), kRowGrain, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin; r < end; ++r) {
          std::memcpy(y + static_cast<std::size_t>(r) * bytes,
                      x + static_cast<std::size_t>(token_of_row[r]) * bytes,
                      bytes);
        }
      });
}

template <class A, class T>
void add_row(A* sum, const T* y, A weight, std::int64_t n) {
#pragma omp simd
  for (std::int64_t c = 0; c < n; ++c)
    sum[c] += weight * static_cast<A>(y[c]);
}

template <class T, class U>
void combine_token(const CombineRows& op, std::int64_t t) {
  using A = acc_t<T>;
  const std::int64_t width = op.u.dim(1), k = op.row_of_assignment.dim(1);
  const auto* rows = op.row_of_assignment.as<std::int32_t>() + t * k;
  const A* weights = op.weights.empty() ? nullptr : op.weights.as<A>() + t * k;
  U* u = op.u.as<U>() + t * width;
  for (std::int64_t c0 = 0; c0 < width; c0 += kColumns) {
    const std::int64_t n = std::min(kColumns, width - c0);
    A sum[kColumns];
    for (std::int64_t c = 0; c < n; ++c)
      sum[c] = op.accumulate ? static_cast<A>(u[c0 + c]) : A(0);
    for (std::int64_t j = 0; j < k; ++j) {
      if (rows[j] >= 0)
        add_row(
            sum, op.y.as<T>() + rows[j] * width + c0, weights == nullptr ? A(1) : weights[j], n);
    }
#pragma omp simd
    for (std::int64_t c = 0; c < n; ++c)
      u[c0 + c] = U(sum[c]);
  }
}

template <class F>
void for_each_assignment(const ConstTensorView& map, F&& f) {
  const auto* row = map.as<std::int32_t>();
  for (std::int64_t a = 0; a < map.numel(); ++a)
    f(a, row[a]);
}

}  // namespace

void launch(CpuContext& context, const DispatchPlan& op) {
  const Arena::Mark mark(context.scratch);
  const TensorView cursor =
      context.scratch.take({op.offsets.dim(0) - 1}, DType::i32, "dispatch_plan.cursor");
  context.stream.enqueue([op, cursor] { make_plan(op, cursor.as<std::int32_t>()); });
}

void launch(CpuContext& context, const GatherRows& op) {
  context.stream.enqueue([op, &pool = context.pool] { gather(pool, op); });
}

void launch(CpuContext& context, const CombineRows& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.y.dtype(), [&]<class T>(TypeTag<T>) {
      dispatch_weight<T>(op.u.dtype(), [&]<class U>(TypeTag<U>) {
        const std::int64_t tokens = count_or(op.token_count, op.u.dim(0));
        pool.parallel_for(tokens, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t t = begin; t < end; ++t)
            combine_token<T, U>(op, t);
        });
      });
    });
  });
}

void launch(CpuContext& context, const RowWeightForward& op) {
  context.stream.enqueue([op] {
    cpu::dispatch_stats(op.weights.dtype(), [&]<class A>(TypeTag<A>) {
      const A* w = op.weights.as<A>();
      A* out = op.row_weight.as<A>();
      for_each_assignment(op.row_of_assignment, [&](std::int64_t a, std::int32_t row) {
        if (row >= 0) out[row] = w[a];
      });
    });
  });
}

void launch(CpuContext& context, const RowWeightBackward& op) {
  context.stream.enqueue([op] {
    cpu::dispatch_stats(op.dweights.dtype(), [&]<class A>(TypeTag<A>) {
      const A* dr = op.drow_weight.as<A>();
      A* out = op.dweights.as<A>();
      for_each_assignment(op.row_of_assignment, [&](std::int64_t a, std::int32_t row) {
        out[a] = row >= 0 ? dr[row] : A(0);
      });
    });
  });
}

}  // namespace moesaic
