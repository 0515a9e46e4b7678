#include "kernels/ops/layer_norm.h"

#include "kernels/cpu/norms.h"
#include "kernels/cpu/rows.h"

namespace moesaic {
namespace {

template <class T, class W>
void forward(ThreadPool& pool, const LayerNormForward& op) {
  using A = acc_t<T>;
  const std::int64_t width = op.x.dim(1);
  const W* w = op.weight.as<W>();
  const W* b = op.bias.as<W>();
  pool.parallel_for(op.x.dim(0), cpu::row_grain(width), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const T* x = op.x.as<T>() + r * width;
      T* y = op.y.as<T>() + r * width;
      A sum = 0;
#pragma omp simd reduction(+ : sum)
      for (std::int64_t c = 0; c < width; ++c)
        sum += static_cast<A>(x[c]);
      const A mean = sum / static_cast<A>(width);
      A squares = 0;  // of the centred values: no cancellation for a large mean
#pragma omp simd reduction(+ : squares)
      for (std::int64_t c = 0; c < width; ++c)
        squares += (static_cast<A>(x[c]) - mean) * (static_cast<A>(x[c]) - mean);
      const A inv = A(1) / std::sqrt(squares / static_cast<A>(width) + static_cast<A>(op.eps));
      op.mean.as<A>()[r] = mean;
      op.inv_std.as<A>()[r] = inv;
#pragma omp simd
      for (std::int64_t c = 0; c < width; ++c) {
        y[c] = T((static_cast<A>(x[c]) - mean) * inv * static_cast<A>(w[c]) + static_cast<A>(b[c]));
      }
    }
  });
}

template <class T, class W>
void backward_row(const LayerNormBackward& op, std::int64_t r, acc_t<T>* dweight, acc_t<T>* dbias) {
  using A = acc_t<T>;
  const std::int64_t width = op.x.dim(1);
  const W* w = op.weight.as<W>();
  const T* x = op.x.as<T>() + r * width;
  const T* dy = op.dy.as<T>() + r * width;
  T* dx = op.dx.as<T>() + r * width;
  const A mean = op.mean.as<A>()[r], inv = op.inv_std.as<A>()[r];
  A sum = 0, dot = 0;
#pragma omp simd reduction(+ : sum, dot)
  for (std::int64_t c = 0; c < width; ++c) {
    const A g = static_cast<A>(dy[c]) * static_cast<A>(w[c]);
    sum += g;
    dot += g * (static_cast<A>(x[c]) - mean) * inv;
  }
  if (dweight != nullptr) {
#pragma omp simd
    for (std::int64_t c = 0; c < width; ++c)
      dweight[c] += static_cast<A>(dy[c]) * (static_cast<A>(x[c]) - mean) * inv;
  }
  if (dbias != nullptr) {
#pragma omp simd
    for (std::int64_t c = 0; c < width; ++c)
      dbias[c] += static_cast<A>(dy[c]);
  }
  const A mean_g = sum / static_cast<A>(width), mean_gx = dot / static_cast<A>(width);
#pragma omp simd
  for (std::int64_t c = 0; c < width; ++c) {
    const A xh = (static_cast<A>(x[c]) - mean) * inv;
    dx[c] = T(inv * (static_cast<A>(dy[c]) * static_cast<A>(w[c]) - mean_g - xh * mean_gx));
  }
}

// `partial` holds, per block of rows, the sums for dweight and then those for dbias.
template <class T, class W>
void backward(ThreadPool& pool, const LayerNormBackward& op, const TensorView& partial) {
  using A = acc_t<T>;
  const std::int64_t rows = op.x.dim(0), width = op.x.dim(1), blocks = cpu::sum_blocks(rows);
  A* weight_sums = op.dweight.empty() ? nullptr : partial.as<A>();
  A* bias_sums =
      op.dbias.empty() ? nullptr : partial.as<A>() + (op.dweight.empty() ? 0 : blocks * width);
  pool.parallel_for(rows, cpu::kSumBlock, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t at = begin / cpu::kSumBlock * width;
    A* dw = weight_sums == nullptr ? nullptr : weight_sums + at;
    A* db = bias_sums == nullptr ? nullptr : bias_sums + at;
    if (dw != nullptr) std::fill_n(dw, width, A(0));
    if (db != nullptr) std::fill_n(db, width, A(0));
    for (std::int64_t r = begin; r < end; ++r)
      backward_row<T, W>(op, r, dw, db);
  });
  if (weight_sums != nullptr)
    cpu::add_block_sums(pool, weight_sums, blocks, width, op.dweight.as<A>());
  if (bias_sums != nullptr) cpu::add_block_sums(pool, bias_sums, blocks, width, op.dbias.as<A>());
}

template <class T>
void l2_forward(ThreadPool& pool, const L2NormForward& op) {
  using A = acc_t<T>;
  const std::int64_t width = op.x.dim(1);
  pool.parallel_for(op.x.dim(0), cpu::row_grain(width), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      op.inv_norm.as<A>()[r] = cpu::l2_norm_row<A>(op.x.as<T>() + r * width,
                                                   op.y.as<T>() + r * width,
                                                   width,
                                                   static_cast<A>(op.eps),
                                                   static_cast<A>(op.scale));
    }
  });
}

template <class T>
void l2_backward(ThreadPool& pool, const L2NormBackward& op) {
  using A = acc_t<T>;
  const std::int64_t width = op.x.dim(1);
  pool.parallel_for(op.x.dim(0), cpu::row_grain(width), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      cpu::l2_norm_row_backward<A>(op.x.as<T>() + r * width,
                                   op.inv_norm.as<A>()[r],
                                   op.dy.as<T>() + r * width,
                                   op.dx.as<T>() + r * width,
                                   width,
                                   static_cast<A>(op.scale));
    }
  });
}

}  // namespace

void launch(CpuContext& context, const LayerNormForward& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
      dispatch_weight<T>(op.weight.dtype(), [&]<class W>(TypeTag<W>) { forward<T, W>(pool, op); });
    });
  });
}

void launch(CpuContext& context, const LayerNormBackward& op) {
  const Arena::Mark mark(context.scratch);
  const std::int64_t sums = (op.dweight.empty() ? 0 : 1) + (op.dbias.empty() ? 0 : 1);
  TensorView partial;
  if (sums > 0) {
    const DType acc = op.x.dtype() == DType::f64 ? DType::f64 : DType::f32;
    partial = context.scratch.take(
        {sums * cpu::sum_blocks(op.x.dim(0)), op.x.dim(1)}, acc, "layer_norm.sums");
  }
  context.stream.enqueue([op, partial, &pool = context.pool] {
    dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
      dispatch_weight<T>(op.weight.dtype(),
                         [&]<class W>(TypeTag<W>) { backward<T, W>(pool, op, partial); });
    });
  });
}

void launch(CpuContext& context, const L2NormForward& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) { l2_forward<T>(pool, op); });
  });
}

void launch(CpuContext& context, const L2NormBackward& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) { l2_backward<T>(pool, op); });
  });
}

}  // namespace moesaic
