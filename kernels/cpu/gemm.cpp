#include "kernels/ops/gemm.h"

#include "kernels/cpu/gemm_blas.h"
#include "kernels/cpu/packed_gemm.h"
#include "kernels/cpu/scratch_slots.h"
#include "kernels/cpu/thread_pool.h"

namespace moesaic {

namespace {

using cpu::kGemmRowBlock;

// Columns of c per unit of work, and at most so many units share a packed part of b.
constexpr std::int64_t kUnitColumns = 512;
constexpr std::int64_t kPartColumns = 1024;
constexpr std::int64_t kPartDepth = 4 * cpu::kGemmDepthBlock;
constexpr std::int64_t kPartElements = kPartColumns * kPartDepth;

// The part of b that is packed at a time. A result that is narrower than the sum must not be rounded in between: then a
// part has all of k.
struct Part {
  std::int64_t columns = 0, depth = 0;
};

template <class T, class C>
Part part_of(const Gemm& op) {
  if (std::is_same_v<C, acc_t<T>>)
    return {std::min(op.n(), kPartColumns), std::min(op.k(), kPartDepth)};
  const std::int64_t fits =
      std::max<std::int64_t>(64, kPartElements / std::max<std::int64_t>(1, op.k()) / 64 * 64);
  return {std::min({op.n(), kPartColumns, fits}), op.k()};
}

template <class T>
void pack_part(ThreadPool& pool,
               const Gemm& op,
               std::int64_t column,
               std::int64_t columns,
               std::int64_t p,
               std::int64_t depth,
               acc_t<T>* packed) {
  using A = acc_t<T>;
  const std::int64_t ld = op.b.dim(1);
  const T* b = op.b.as<T>() + (op.transpose_b ? column * ld + p : p * ld + column);
  constexpr std::int64_t kGrain = 4 * cpu::kPackColumns<A>;
  pool.parallel_for(columns, kGrain, [&](std::int64_t begin, std::int64_t end) {
    cpu::pack_columns<A, T>(b, ld, op.transpose_b, depth, begin, end, packed);
  });
}

template <class T, class C>
void multiply_part(ThreadPool& pool,
                   const Gemm& op,
                   std::int64_t column,
                   std::int64_t columns,
                   std::int64_t p,
                   std::int64_t depth,
                   cpu::ScratchSlots& slots,
                   const acc_t<T>* packed) {
  using A = acc_t<T>;
  const std::int64_t row_blocks = (op.m() + kGemmRowBlock - 1) / kGemmRowBlock,
                     units = (columns + kUnitColumns - 1) / kUnitColumns;
  cpu::PackedProduct<T, C> product;
  product.lda = op.a.dim(1);
  product.a = op.a.as<T>() + (op.transpose_a ? p * product.lda : p);
  product.transpose_a = op.transpose_a;
  product.b_rows = product.k = depth;
  product.ldc = op.n();
  product.alpha = static_cast<A>(op.alpha);
  product.accumulate = op.accumulate || p > 0;
  pool.parallel_for(row_blocks * units, 1, [&](std::int64_t begin, std::int64_t end) {
    const cpu::ScratchSlots::Lease<A> scratch(slots);
    for (std::int64_t unit = begin; unit < end; ++unit) {
      const std::int64_t first = unit / row_blocks * kUnitColumns,
                         row = unit % row_blocks * kGemmRowBlock;
      auto mine = product;
      mine.b = packed + first * depth;
      mine.c = op.c.as<C>() + column + first;
      mine.n = std::min(kUnitColumns, columns - first);
      mine.rows(row, std::min(op.m(), row + kGemmRowBlock), scratch.data());
    }
  });
}

template <class T, class C>
void gemm(ThreadPool& pool, const Gemm& op, const TensorView& slot_rows, const TensorView& packed) {
  using A = acc_t<T>;
  if (op.k() == 0 || op.alpha == 0.0) {
    if (!op.accumulate) std::fill_n(op.c.as<C>(), op.c.numel(), C(0.0F));
    return;
  }
  const Part part = part_of<T, C>(op);
  cpu::ScratchSlots slots(slot_rows);
  for (std::int64_t column = 0; column < op.n(); column += part.columns) {
    const std::int64_t columns = std::min(part.columns, op.n() - column);
    for (std::int64_t p = 0; p < op.k(); p += part.depth) {
      const std::int64_t depth = std::min(part.depth, op.k() - p);
      pack_part<T>(pool, op, column, columns, p, depth, packed.as<A>());
      multiply_part<T, C>(pool, op, column, columns, p, depth, slots, packed.as<A>());
    }
  }
}

}  // namespace

void launch(CpuContext& context, const Gemm& op) {
  if (op.m() == 0 || op.n() == 0) return;
  if (cpu::blas_takes(op)) return cpu::launch_blas_gemm(context, op);
  dispatch_float(op.a.dtype(), [&]<class T>(TypeTag<T>) {
    dispatch_weight<T>(op.c.dtype(), [&]<class C>(TypeTag<C>) {
      using A = acc_t<T>;
      const Part part = part_of<T, C>(op);
      const Arena::Mark mark(context.scratch);
      const std::int64_t per_slot = cpu::PackedProduct<T, C>::scratch_size(
          std::min(part.columns, kUnitColumns), part.depth, op.transpose_a);
      const TensorView slots =
          context.scratch.take({context.pool.num_threads(), per_slot}, dtype_of<A>, "gemm.tiles");
      const TensorView packed = context.scratch.take(
          {std::max<std::int64_t>(1, cpu::packed_size<A>(part.depth, part.columns))},
          dtype_of<A>,
          "gemm.b");
      context.stream.enqueue(
          [op, slots, packed, &pool = context.pool] { gemm<T, C>(pool, op, slots, packed); });
    });
  });
}

}  // namespace moesaic
