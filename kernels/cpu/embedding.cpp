#include "kernels/ops/embedding.h"

#include "kernels/cpu/rows.h"

namespace moesaic {
namespace {

// Owners of table rows in the backward pass: owner o adds to the rows whose number is o modulo this.
constexpr std::int64_t kOwners = 32;

// The row of a block of `words` rows that a token has, or -1 when its word is of another block.
template <class Op>
std::int64_t row_of(const Op& op, std::int32_t id, std::int64_t words) {
  MOESAIC_CHECK(0 <= id && id < op.vocabulary(),
                "token id " + std::to_string(id) + " outside the vocabulary of " +
                    std::to_string(op.vocabulary()));
  const std::int64_t row = id - op.block * words;
  return 0 <= row && row < words ? row : -1;
}

template <class T, class Y>
void gather(ThreadPool& pool, const EmbeddingForward& op) {
  const std::int64_t words = op.table.dim(0), d = op.table.dim(1);
  const auto* ids = op.ids.as<std::int32_t>();
  pool.parallel_for(op.ids.dim(0), cpu::row_grain(d), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t at = row_of(op, ids[t], words);
      Y* y = op.y.as<Y>() + t * d;
      if (at < 0) {
        std::fill_n(y, d, Y(acc_t<T>(0)));
        continue;
      }
      const T* row = op.table.as<T>() + at * d;
#pragma omp simd
      for (std::int64_t c = 0; c < d; ++c)
        y[c] = Y(static_cast<acc_t<T>>(row[c]));
    }
  });
}

template <class T, class G>
void scatter(ThreadPool& pool, const EmbeddingBackward& op) {
  using A = acc_t<T>;
  const std::int64_t words = op.dtable.dim(0), d = op.dtable.dim(1), tokens = op.ids.dim(0);
  const auto* ids = op.ids.as<std::int32_t>();
  pool.parallel_for(kOwners, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      const std::int64_t at = row_of(op, ids[t], words);
      if (const std::int64_t owner = at % kOwners; owner < begin || owner >= end) continue;
      const T* dy = op.dy.as<T>() + t * d;
      G* row = op.dtable.as<G>() + at * d;
#pragma omp simd
      for (std::int64_t c = 0; c < d; ++c)
        row[c] = G(static_cast<A>(row[c]) + static_cast<A>(dy[c]));
    }
  });
}

}  // namespace

void launch(CpuContext& context, const EmbeddingForward& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.table.dtype(), [&]<class T>(TypeTag<T>) {
      dispatch_float(op.y.dtype(), [&]<class Y>(TypeTag<Y>) { gather<T, Y>(pool, op); });
    });
  });
}

void launch(CpuContext& context, const EmbeddingBackward& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.dy.dtype(), [&]<class T>(TypeTag<T>) {
      dispatch_weight<T>(op.dtable.dtype(), [&]<class G>(TypeTag<G>) { scatter<T, G>(pool, op); });
    });
  });
}

}  // namespace moesaic
