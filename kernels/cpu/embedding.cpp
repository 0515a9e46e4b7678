#include "kernels/ops/embedding.h"

#include "kernels/cpu/rows.h"

namespace moesaic {
namespace {

// Owners of table rows in the backward pass: owner o adds to the rows whose id is o modulo this.
constexpr std::int64_t kOwners = 32;

std::int64_t checked_id(std::int32_t id, std::int64_t vocabulary) {
  MOESAIC_CHECK(0 <= id && id < vocabulary,
                "token id " + std::to_string(id) + " outside the vocabulary of " +
                    std::to_string(vocabulary));
  return id;
}

template <class T, class Y>
void gather(ThreadPool& pool, const EmbeddingForward& op) {
  const std::int64_t d = op.table.dim(1);
  const auto* ids = op.ids.as<std::int32_t>();
  pool.parallel_for(op.ids.dim(0), cpu::row_grain(d), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const T* row = op.table.as<T>() + checked_id(ids[t], op.table.dim(0)) * d;
      Y* y = op.y.as<Y>() + t * d;
#pragma omp simd
      for (std::int64_t c = 0; c < d; ++c)
        y[c] = Y(static_cast<acc_t<T>>(row[c]));
    }
  });
}

template <class T, class G>
void scatter(ThreadPool& pool, const EmbeddingBackward& op) {
  using A = acc_t<T>;
  const std::int64_t d = op.dtable.dim(1), tokens = op.ids.dim(0);
  const auto* ids = op.ids.as<std::int32_t>();
  pool.parallel_for(kOwners, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      const std::int64_t id = checked_id(ids[t], op.dtable.dim(0));
      if (const std::int64_t owner = id % kOwners; owner < begin || owner >= end) continue;
      const T* dy = op.dy.as<T>() + t * d;
      G* row = op.dtable.as<G>() + id * d;
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
