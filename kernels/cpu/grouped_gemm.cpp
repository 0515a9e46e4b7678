#include "kernels/ops/grouped_gemm.h"

#include "kernels/cpu/packed_gemm.h"
#include "kernels/cpu/scratch_slots.h"
#include "kernels/cpu/thread_pool.h"

namespace moesaic {
namespace {

using cpu::kGemmDepthBlock;
using cpu::kGemmRowBlock;

// Columns of y (rows of dw) per unit of work: enough units for the threads, and the share of an operand that is packed for
// all rows of an expert.
constexpr std::int64_t kPanel = 384;

struct Expert {
  std::int64_t begin = 0, rows = 0, slot = 0;
};

// Routing is data: it is checked here, where it is first known.
Expert expert_of(const ConstTensorView& offsets,
                 const ConstTensorView& slots,
                 std::int64_t e,
                 std::int64_t rows_bound,
                 std::int64_t num_slots) {
  const auto* o = offsets.as<std::int32_t>();
  const std::int64_t slot = slots.as<std::int32_t>()[e];
  MOESAIC_CHECK(0 <= o[e] && o[e] <= o[e + 1] && o[e + 1] <= rows_bound,
                "expert offsets outside the rows");
  if (o[e] == o[e + 1]) return {o[e], 0, 0};
  MOESAIC_CHECK(0 <= slot && slot < num_slots, "expert without a weight slot");
  return {o[e], o[e + 1] - o[e], slot};
}

std::int64_t panels_of(std::int64_t n) {
  return (n + kPanel - 1) / kPanel;
}

// Forward (transpose_b: b = W) and backward input (b = W, not transposed) are one product per expert.
template <class T, class C>
struct RowProduct {
  using A = acc_t<T>;
  const T* a;
  const T* w;
  C* c;
  std::int64_t rows_bound, depth, columns;  // a [rows, depth], c [rows, columns]
  std::int64_t w_rows, w_cols, num_slots;
  bool transpose_b, accumulate;
  ConstTensorView offsets, slot_of_expert;

  static std::int64_t slot_size(std::int64_t columns, std::int64_t depth) {
    const std::int64_t panel = std::min(columns, kPanel);
    return cpu::PackedProduct<T, C>::scratch_size(panel, depth, false) +
           cpu::packed_size<A>(depth, panel);
  }

  void panel(const Expert& expert, std::int64_t column, A* scratch) const {
    cpu::PackedProduct<T, C> product;
    product.n = std::min(kPanel, columns - column);
    product.a = a + expert.begin * depth;
    product.lda = depth;
    product.c = c + expert.begin * columns + column;
    product.ldc = columns;
    product.k = product.b_rows = depth;
    product.accumulate = accumulate;
    A* packed =
        scratch + cpu::PackedProduct<T, C>::scratch_size(std::min(columns, kPanel), depth, false);
    const T* b = w + expert.slot * w_rows * w_cols + (transpose_b ? column * w_cols : column);
    cpu::pack_columns<A, T>(b, w_cols, transpose_b, depth, 0, product.n, packed);
    product.b = packed;
    for (std::int64_t row = 0; row < expert.rows; row += kGemmRowBlock) {
      product.rows(row, std::min(expert.rows, row + kGemmRowBlock), scratch);
    }
  }

  void run(ThreadPool& pool, const TensorView& slot_rows) const {
    cpu::ScratchSlots slots(slot_rows);
    const std::int64_t panels = panels_of(columns);
    pool.parallel_for(slot_of_expert.dim(0) * panels, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t unit = begin; unit < end; ++unit) {
        const Expert expert =
            expert_of(offsets, slot_of_expert, unit / panels, rows_bound, num_slots);
        if (expert.rows == 0) continue;
        const cpu::ScratchSlots::Lease<A> scratch(slots);
        panel(expert, (unit % panels) * kPanel, scratch.data());
      }
    });
  }
};

template <class T, class C>
void enqueue(CpuContext& context, const RowProduct<T, C>& product) {
  const Arena::Mark mark(context.scratch);
  const TensorView slots = context.scratch.take(
      {context.pool.num_threads(), RowProduct<T, C>::slot_size(product.columns, product.depth)},
      dtype_of<acc_t<T>>,
      "grouped_gemm.tiles");
  context.stream.enqueue([product, slots, &pool = context.pool] { product.run(pool, slots); });
}

// Rows of tokens whose x is packed at a time. A dw that is narrower than the sum must not be rounded between blocks of
// rows: then all rows are one block. Else the sum of an element goes on from dw row by row, whatever the blocks, so that rows
// in several calls give the bits of one.
template <class T, class C>
std::int64_t weight_depth(std::int64_t rows) {
  return std::is_same_v<C, acc_t<T>> ? std::min(rows, 2 * kGemmDepthBlock) : rows;
}

template <class T, class C>
void weight_panel(const GroupedLinearBackwardWeight& op,
                  const Expert& expert,
                  std::int64_t row,
                  acc_t<T>* scratch) {
  using A = acc_t<T>;
  const std::int64_t n = op.dy.dim(1), k = op.x.dim(1), rows = std::min(kPanel, n - row);
  const std::int64_t step = weight_depth<T, C>(expert.rows);
  A* packed = scratch + cpu::PackedProduct<T, C>::scratch_size(k, step, true);
  for (std::int64_t p = 0; p < expert.rows; p += step) {
    cpu::PackedProduct<T, C> product;
    product.a = op.dy.as<T>() + (expert.begin + p) * n + row;
    product.lda = n;
    product.transpose_a = true;
    product.c = op.dw.as<C>() + (expert.slot * n + row) * k;
    product.ldc = k;
    product.n = k;
    product.k = product.b_rows = std::min(step, expert.rows - p);
    product.accumulate = product.chained = true;
    cpu::pack_columns<A, T>(
        op.x.as<T>() + (expert.begin + p) * k, k, false, product.k, 0, k, packed);
    product.b = packed;
    for (std::int64_t r = 0; r < rows; r += kGemmRowBlock)
      product.rows(r, std::min(rows, r + kGemmRowBlock), scratch);
  }
}

template <class T, class C>
void weight_gradient(ThreadPool& pool,
                     const GroupedLinearBackwardWeight& op,
                     const TensorView& slot_rows) {
  cpu::ScratchSlots slots(slot_rows);
  const std::int64_t panels = panels_of(op.dy.dim(1));
  pool.parallel_for(
      op.slot_of_expert.dim(0) * panels, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t unit = begin; unit < end; ++unit) {
          const Expert expert =
              expert_of(op.offsets, op.slot_of_expert, unit / panels, op.x.dim(0), op.dw.dim(0));
          if (expert.rows == 0) continue;
          const cpu::ScratchSlots::Lease<acc_t<T>> scratch(slots);
          weight_panel<T, C>(op, expert, (unit % panels) * kPanel, scratch.data());
        }
      });
}

}  // namespace

void launch(CpuContext& context, const GroupedLinearForward& op) {
  dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
    dispatch_weight<T>(op.y.dtype(), [&]<class C>(TypeTag<C>) {
      const RowProduct<T, C> product{op.x.as<T>(),
                                     op.w.as<T>(),
                                     op.y.as<C>(),
                                     op.x.dim(0),
                                     op.x.dim(1),
                                     op.w.dim(1),
                                     op.w.dim(1),
                                     op.w.dim(2),
                                     op.w.dim(0),
                                     true,
                                     op.accumulate,
                                     op.offsets,
                                     op.slot_of_expert};
      enqueue(context, product);
    });
  });
}

void launch(CpuContext& context, const GroupedLinearBackwardInput& op) {
  dispatch_float(op.dy.dtype(), [&]<class T>(TypeTag<T>) {
    dispatch_weight<T>(op.dx.dtype(), [&]<class C>(TypeTag<C>) {
      const RowProduct<T, C> product{op.dy.as<T>(),
                                     op.w.as<T>(),
                                     op.dx.as<C>(),
                                     op.dy.dim(0),
                                     op.dy.dim(1),
                                     op.w.dim(2),
                                     op.w.dim(1),
                                     op.w.dim(2),
                                     op.w.dim(0),
                                     false,
                                     op.accumulate,
                                     op.offsets,
                                     op.slot_of_expert};
      enqueue(context, product);
    });
  });
}

void launch(CpuContext& context, const GroupedLinearBackwardWeight& op) {
  dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
    dispatch_weight<T>(op.dw.dtype(), [&]<class C>(TypeTag<C>) {
      using A = acc_t<T>;
      const std::int64_t k = op.x.dim(1);
      const std::int64_t depth = weight_depth<T, C>(op.x.dim(0));
      const std::int64_t size =
          cpu::PackedProduct<T, C>::scratch_size(k, depth, true) + cpu::packed_size<A>(depth, k);
      const Arena::Mark mark(context.scratch);
      const TensorView slots = context.scratch.take(
          {context.pool.num_threads(), size}, dtype_of<A>, "grouped_gemm.weight_tiles");
      context.stream.enqueue(
          [op, slots, &pool = context.pool] { weight_gradient<T, C>(pool, op, slots); });
    });
  });
}

}  // namespace moesaic
