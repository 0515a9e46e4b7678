#include "kernels/ops/head_linear.h"

#include <cstring>

#include "kernels/cpu/thread_pool.h"
#include "kernels/cpu/tiles.h"

namespace moesaic {
namespace {
using namespace cpu;

Rows rows_of(const ConstTensorView& x, std::int64_t begin, std::int64_t n, std::int64_t head) {
  const std::int64_t channels = x.dim(2);
  return {x, head * channels + begin, x.dim(1) * channels, n};
}
// W_h.
Rows block_of(const ConstTensorView& w, std::int64_t heads, std::int64_t begin, std::int64_t head) {
  const std::int64_t n = w.dim(1);
  return {w, (head * (w.dim(0) / heads) + begin) * n, n, n};
}

// Whole tiles of rows go to the BLAS library, so that a row's bits do not depend on how many there are.
template <class A>
void linear(CpuContext& context, const HeadLinear& op) {
  const std::int64_t rows = op.x.x.dim(0), heads = op.x.x.dim(1), n = op.w.dim(1), m = op.m,
                     from = op.from(), to = op.to();
  const Arena::Mark mark(context.scratch);
  const int threads = context.pool.num_threads();
  MOESAIC_CHECK(threads <= Slots::kMax, "too many threads");
  const std::size_t slot = slot_bytes<A>({kTile * from, kTile * to});
  const TensorView slot_memory = context.scratch.take(
      {threads, static_cast<std::int64_t>(slot)}, DType::u8, "head_linear rows");
  const TensorView weights =
      context.scratch.take({heads, m, n}, dtype_of<A>, "head_linear weights");
  context.stream.enqueue([=, &pool = context.pool] {
    A* const w = weights.as<A>();
    pool.parallel_for(heads, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t h = begin; h < end; ++h)
        load_rows(w + h * m * n, n, block_of(op.w, heads, op.row_begin, h), m, m);
    });
    Slots slots(slot_memory.data(), slot, threads);
    pool.parallel_for(heads * tiles_of(rows), 1, [&](std::int64_t begin, std::int64_t end) {
      Slots::Lease lease(slots);
      A* x = lease.template take<A>(kTile * from);
      A* y = lease.template take<A>(kTile * to);
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t h = i / tiles_of(rows), row = i % tiles_of(rows) * kTile,
                           count = std::min(kTile, rows - row);
        load_rows(x, from, rows_of(op.x.x, op.x.begin, from, h).from(row), count, kTile);
        blas_gemm(
            false, op.transpose_w, kTile, to, from, A(1), x, from, w + h * m * n, n, A(0), y, to);
        const Rows target = rows_of(op.y.x, op.y.begin, to, h).from(row);
        store_rows(op.y.x, target.offset, target.stride, count, to, y, to);
      }
    });
  });
}

// One task per head; rows in tiles, tiles in order.
template <class A>
void backward_weight(CpuContext& context, const HeadLinearBackwardWeight& op) {
  const std::int64_t rows = op.a.x.dim(0), heads = op.a.x.dim(1), n = op.dw.dim(1), m = op.m;
  const Arena::Mark mark(context.scratch);
  const int threads = context.pool.num_threads();
  MOESAIC_CHECK(threads <= Slots::kMax, "too many threads");
  const std::size_t slot = slot_bytes<A>({kTile * m, kTile * n, m * n});
  const TensorView slot_memory = context.scratch.take(
      {threads, static_cast<std::int64_t>(slot)}, DType::u8, "head_linear rows");
  context.stream.enqueue([=, &pool = context.pool] {
    Slots slots(slot_memory.data(), slot, threads);
    pool.parallel_for(heads, 1, [&](std::int64_t begin, std::int64_t end) {
      Slots::Lease lease(slots);
      A* a = lease.template take<A>(kTile * m);
      A* b = lease.template take<A>(kTile * n);
      A* sum = lease.template take<A>(m * n);
      for (std::int64_t h = begin; h < end; ++h) {
        const Rows target = block_of(op.dw, heads, op.row_begin, h);
        load_rows(sum, n, target, m, m);
        for (std::int64_t row = 0; row < rows; row += kTile) {
          const std::int64_t count = std::min(kTile, rows - row);
          load_rows(a, m, rows_of(op.a.x, op.a.begin, m, h).from(row), count, kTile);
          load_rows(b, n, rows_of(op.b.x, op.b.begin, n, h).from(row), count, kTile);
          blas_gemm(true, false, m, n, kTile, A(1), a, m, b, n, A(1), sum, n);
        }
        store_rows(op.dw, target.offset, target.stride, m, n, sum, n);
      }
    });
  });
}

}  // namespace

void launch(CpuContext& context, const HeadLinear& op) {
  op.x.x.dtype() == DType::f64 ? linear<double>(context, op) : linear<float>(context, op);
}

void launch(CpuContext& context, const HeadLinearBackwardWeight& op) {
  op.a.x.dtype() == DType::f64 ? backward_weight<double>(context, op)
                               : backward_weight<float>(context, op);
}

void launch(CpuContext& context, const CopyHeadColumns& op) {
  context.stream.enqueue([op] {
    const std::size_t size = byte_size(op.x.x.dtype());
    const auto offset = [size](std::int64_t elements) {
      return static_cast<std::size_t>(elements) * size;
    };
    const std::int64_t heads = op.x.x.dim(0) * op.x.x.dim(1);
    for (std::int64_t i = 0; i < heads; ++i)
      std::memcpy(op.y.x.data() + offset(i * op.y.x.dim(2) + op.y.begin),
                  op.x.x.data() + offset(i * op.x.x.dim(2) + op.x.begin),
                  offset(op.n));
  });
}

}  // namespace moesaic
