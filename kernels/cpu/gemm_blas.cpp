#include "kernels/cpu/gemm_blas.h"

#include <algorithm>

#include "kernels/cpu/blas.h"
#include "kernels/cpu/packed_gemm.h"
#include "kernels/cpu/scratch_slots.h"
#include "kernels/cpu/thread_pool.h"

namespace moesaic::cpu {
namespace {

// A unit of work; part of the bits. Large, because the library rearranges both operands for each call.
constexpr std::int64_t kTileRows = 256, kTileColumns = 512;
// Values of k that are converted at a time, for operands narrower than the sum; part of their bits.
constexpr std::int64_t kDepth = 512;
// Below these the own kernel is as fast.
constexpr std::int64_t kLeastFeatures = 128, kLeastDepth = 64;

template <class T, class C>
struct TileProduct {
  using A = acc_t<T>;
  const Gemm& op;
  std::int64_t row, rows, column, columns;

  static constexpr bool kConvertOperands = !std::is_same_v<T, A>;
  static constexpr bool kConvertResult = !std::is_same_v<C, A>;
  static constexpr std::int64_t kScratch =
      1 + (kConvertOperands ? (kTileRows + kTileColumns) * kDepth : 0) +
      (kConvertResult ? kTileRows * kTileColumns : 0);

  void run(A* scratch) const {
    C* const c = op.c.as<C>() + row * op.n() + column;
    if constexpr (kConvertResult) {
      if (op.accumulate) convert_block(c, op.n(), scratch, columns, rows, columns);
      multiply(scratch, columns, scratch + kTileRows * kTileColumns);
      convert_block(scratch, columns, c, op.n(), rows, columns);
    } else {
      multiply(c, op.n(), scratch);
    }
  }

 private:
  void multiply(A* c, std::int64_t ldc, A* scratch) const {
    const std::int64_t lda = op.a.dim(1), ldb = op.b.dim(1);
    const T* a = op.a.as<T>() + row;
    const T* b = op.b.as<T>() + (op.transpose_b ? column * ldb : column);
    if constexpr (!kConvertOperands) {
      call(a, lda, b, ldb, op.k(), op.accumulate, c, ldc);
    } else {
      A* const to_b = scratch + kTileRows * kDepth;
      for (std::int64_t p = 0; p < op.k(); p += kDepth) {
        const std::int64_t depth = std::min(kDepth, op.k() - p);
        convert_block(a + p * lda, lda, scratch, rows, depth, rows);
        if (op.transpose_b) {
          convert_block(b + p, ldb, to_b, depth, columns, depth);
        } else {
          convert_block(b + p * ldb, ldb, to_b, columns, depth, columns);
        }
        call(scratch,
             rows,
             to_b,
             op.transpose_b ? depth : columns,
             depth,
             op.accumulate || p > 0,
             c,
             ldc);
      }
    }
  }
  void call(const A* a,
            std::int64_t lda,
            const A* b,
            std::int64_t ldb,
            std::int64_t depth,
            bool add,
            A* c,
            std::int64_t ldc) const {
    blas_gemm<A>(true,
                 op.transpose_b,
                 rows,
                 columns,
                 depth,
                 static_cast<A>(op.alpha),
                 a,
                 lda,
                 b,
                 ldb,
                 add ? A(1) : A(0),
                 c,
                 ldc);
  }
};

template <class T, class C>
void multiply(ThreadPool& pool, const Gemm& op, const TensorView& slot_rows) {
  ScratchSlots slots(slot_rows);
  const std::int64_t down = (op.m() + kTileRows - 1) / kTileRows,
                     across = (op.n() + kTileColumns - 1) / kTileColumns;
  pool.parallel_for(down * across, 1, [&](std::int64_t begin, std::int64_t end) {
    const ScratchSlots::Lease<acc_t<T>> scratch(slots);
    for (std::int64_t unit = begin; unit < end; ++unit) {
      const std::int64_t row = unit / across * kTileRows, column = unit % across * kTileColumns;
      TileProduct<T, C>{op,
                        row,
                        std::min(kTileRows, op.m() - row),
                        column,
                        std::min(kTileColumns, op.n() - column)}
          .run(scratch.data());
    }
  });
}

}  // namespace

bool blas_takes(const Gemm& op) {
  return op.transpose_a && std::min(op.m(), op.n()) >= kLeastFeatures && op.k() >= kLeastDepth &&
         op.alpha != 0.0;
}

void launch_blas_gemm(CpuContext& context, const Gemm& op) {
  dispatch_float(op.a.dtype(), [&]<class T>(TypeTag<T>) {
    dispatch_weight<T>(op.c.dtype(), [&]<class C>(TypeTag<C>) {
      const Arena::Mark mark(context.scratch);
      const TensorView slots =
          context.scratch.take({context.pool.num_threads(), TileProduct<T, C>::kScratch},
                               dtype_of<acc_t<T>>,
                               "gemm.tiles");
      context.stream.enqueue(
          [op, slots, &pool = context.pool] { multiply<T, C>(pool, op, slots); });
    });
  });
}

}  // namespace moesaic::cpu
