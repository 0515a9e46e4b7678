#include "kernels/cpu/gemm.h"

#include <cblas.h>

#include "kernels/cpu/gemm_tiles.h"
#include "kernels/cpu/scratch_slots.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/ops/gemm.h"

namespace moesaic {

namespace cpu {

template <class T>
void gemm_tile(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, T alpha, const T* a,
               std::int64_t lda, const T* b, std::int64_t ldb, T beta, T* c, std::int64_t ldc) {
  const auto ta = transpose_a ? CblasTrans : CblasNoTrans;
  const auto tb = transpose_b ? CblasTrans : CblasNoTrans;
  const auto i = [](std::int64_t v) { return static_cast<blasint>(v); };
  if constexpr (std::is_same_v<T, double>) {
    cblas_dgemm(CblasRowMajor, ta, tb, i(m), i(n), i(k), alpha, a, i(lda), b, i(ldb), beta, c, i(ldc));
  } else {
    cblas_sgemm(CblasRowMajor, ta, tb, i(m), i(n), i(k), alpha, a, i(lda), b, i(ldb), beta, c, i(ldc));
  }
}
template void gemm_tile<float>(bool, bool, std::int64_t, std::int64_t, std::int64_t, float, const float*, std::int64_t,
                               const float*, std::int64_t, float, float*, std::int64_t);
template void gemm_tile<double>(bool, bool, std::int64_t, std::int64_t, std::int64_t, double, const double*,
                                std::int64_t, const double*, std::int64_t, double, double*, std::int64_t);

}  // namespace cpu

namespace {

using cpu::kGemmDepthBlock;
using cpu::kGemmRowTile;

// Columns of c per unit of work: parallel work for products of few rows, and the share of b that is converted at a time.
constexpr std::int64_t kColumnBlock = 1024;

// How b is walked. Operands that need conversion are converted one block at a time; with a transposed a (b has a row per
// token) also in blocks of the depth, unless c would be rounded in between.
struct Walk {
  std::int64_t columns = 0;  // of c, per block
  std::int64_t depth = 0;    // of b, per converted block
  bool convert_b = false;
};

template <class T, class C>
Walk walk_of(const Gemm& op) {
  const bool convert = !std::is_same_v<T, acc_t<T>>;
  const bool by_depth = convert && op.transpose_a && std::is_same_v<C, acc_t<T>>;
  return {std::min(op.n(), kColumnBlock), by_depth ? std::min(op.k(), kGemmDepthBlock) : op.k(), convert};
}

template <class T, class C>
void clear(const Gemm& op) {
  if (!op.accumulate) std::fill_n(op.c.as<C>(), op.c.numel(), C(0.0F));
}

template <class T, class C>
cpu::TileProduct<T, C> block_product(const Gemm& op, std::int64_t column, std::int64_t columns, std::int64_t p,
                                     std::int64_t depth) {
  using A = acc_t<T>;
  cpu::TileProduct<T, C> tile;
  tile.lda = op.a.dim(1);
  tile.a = op.a.as<T>() + (op.transpose_a ? p * tile.lda : p);
  tile.transpose_a = op.transpose_a;
  tile.transpose_b = op.transpose_b;
  tile.ldc = op.n();
  tile.c = op.c.as<C>() + column;
  tile.m = op.m();
  tile.n = columns;
  tile.k = depth;
  tile.alpha = static_cast<A>(op.alpha);
  tile.accumulate = op.accumulate || p > 0;
  return tile;
}

// The block of b for these columns and depths, in the accumulation type.
template <class T>
void convert_b(ThreadPool& pool, const Gemm& op, std::int64_t column, std::int64_t columns, std::int64_t p,
               std::int64_t depth, acc_t<T>* to) {
  const std::int64_t ld = op.b.dim(1);
  const T* from = op.b.as<T>() + (op.transpose_b ? column * ld + p : p * ld + column);
  const std::int64_t rows = op.transpose_b ? columns : depth, cols = op.transpose_b ? depth : columns;
  pool.parallel_for(rows, 32, [&](std::int64_t begin, std::int64_t end) {
    cpu::convert_block(from + begin * ld, ld, to + begin * cols, cols, end - begin, cols);
  });
}

template <class T, class C>
void gemm(ThreadPool& pool, const Gemm& op, const TensorView& slot_rows, const TensorView& b_block) {
  using A = acc_t<T>;
  if (op.k() == 0 || op.alpha == 0.0) return clear<T, C>(op);
  const Walk walk = walk_of<T, C>(op);
  cpu::ScratchSlots slots(slot_rows);
  const std::int64_t row_tiles = (op.m() + kGemmRowTile - 1) / kGemmRowTile;
  const auto run_block = [&](std::int64_t row_tile, std::int64_t column, std::int64_t p, const A* b, std::int64_t ldb) {
    const std::int64_t columns = std::min(walk.columns, op.n() - column), depth = std::min(walk.depth, op.k() - p);
    auto tile = block_product<T, C>(op, column, columns, p, depth);
    tile.b = b;
    tile.ldb = ldb;
    const cpu::ScratchSlots::Lease<A> scratch(slots);
    tile.row_tile(row_tile * kGemmRowTile, scratch.data());
  };
  if constexpr (std::is_same_v<T, A>) {
    const std::int64_t blocks = (op.n() + walk.columns - 1) / std::max<std::int64_t>(1, walk.columns);
    const A* b = op.b.as<A>();
    const std::int64_t ldb = op.b.dim(1);
    pool.parallel_for(row_tiles * blocks, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t unit = begin; unit < end; ++unit) {
        const std::int64_t column = (unit / row_tiles) * walk.columns;
        run_block(unit % row_tiles, column, 0, op.transpose_b ? b + column * ldb : b + column, ldb);
      }
    });
  } else {
    for (std::int64_t column = 0; column < op.n(); column += walk.columns) {
      const std::int64_t columns = std::min(walk.columns, op.n() - column);
      for (std::int64_t p = 0; p < op.k(); p += walk.depth) {
        const std::int64_t depth = std::min(walk.depth, op.k() - p);
        convert_b<T>(pool, op, column, columns, p, depth, b_block.as<A>());
        pool.parallel_for(row_tiles, 1, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t t = begin; t < end; ++t) {
            run_block(t, column, p, b_block.as<A>(), op.transpose_b ? depth : columns);
          }
        });
      }
    }
  }
}

// c of the operands' type or the accumulation type.
template <class T, class F>
void dispatch_result(DType dtype, F&& f) {
  dispatch_weight<T>(dtype, std::forward<F>(f));
}

}  // namespace

void launch(CpuContext& context, const Gemm& op) {
  if (op.m() == 0 || op.n() == 0) return;
  dispatch_float(op.a.dtype(), [&]<class T>(TypeTag<T>) {
    dispatch_result<T>(op.c.dtype(), [&]<class C>(TypeTag<C>) {
      using A = acc_t<T>;
      const Walk walk = walk_of<T, C>(op);
      const Arena::Mark mark(context.scratch);
      const bool tiles_in_place = !walk.convert_b && op.m() % kGemmRowTile == 0;
      const std::int64_t per_slot =
          tiles_in_place ? 1 : cpu::TileProduct<T, C>::scratch_size(walk.columns, walk.depth, op.transpose_a);
      const TensorView slots = context.scratch.take({context.pool.num_threads(), per_slot}, dtype_of<A>, "gemm.tiles");
      const TensorView b_block =
          walk.convert_b ? context.scratch.take({walk.columns * walk.depth}, dtype_of<A>, "gemm.b") : TensorView{};
      context.stream.enqueue([op, slots, b_block, &pool = context.pool] { gemm<T, C>(pool, op, slots, b_block); });
    });
  });
}

}  // namespace moesaic
