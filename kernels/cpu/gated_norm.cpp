#include "kernels/ops/gated_norm.h"

#include "kernels/cpu/math.h"
#include "kernels/cpu/norms.h"
#include "kernels/cpu/rows.h"

namespace moesaic {
namespace {

template <class T, class W>
void norm_forward(ThreadPool& pool, const GatedRmsNormForward& op) {
  using A = acc_t<T>;
  const std::int64_t rows = op.x.dim(0) * op.x.dim(1), width = op.x.dim(2);
  const W* w = op.weight.as<W>();
  pool.parallel_for(rows, cpu::row_grain(width), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const T* x = op.x.as<T>() + r * width;
      const T* gate = op.gate.as<T>() + r * width;
      T* y = op.y.as<T>() + r * width;
      const A rho = cpu::inverse_rms<A>(x, width, static_cast<A>(op.eps));
      op.inv_rms.as<A>()[r] = rho;
#pragma omp simd
      for (std::int64_t c = 0; c < width; ++c) {
        y[c] = T(static_cast<A>(x[c]) * rho * static_cast<A>(w[c]) *
                 cpu::sigmoid(static_cast<A>(gate[c])));
      }
    }
  });
}

// One row; adds dy sigma(gate) xh to `dweight` when that is not null.
template <class T, class W>
void norm_backward_row(const GatedRmsNormBackward& op, std::int64_t r, acc_t<T>* dweight) {
  using A = acc_t<T>;
  const std::int64_t width = op.x.dim(2);
  const W* w = op.weight.as<W>();
  const T* x = op.x.as<T>() + r * width;
  const T* gate = op.gate.as<T>() + r * width;
  const T* dy = op.dy.as<T>() + r * width;
  T* dx = op.dx.as<T>() + r * width;
  T* dgate = op.dgate.as<T>() + r * width;
  const A rho = op.inv_rms.as<A>()[r];
  A dot = 0;
#pragma omp simd reduction(+ : dot)
  for (std::int64_t c = 0; c < width; ++c) {
    dot += static_cast<A>(dy[c]) * cpu::sigmoid(static_cast<A>(gate[c])) * static_cast<A>(w[c]) *
           static_cast<A>(x[c]);
  }
  const A mean = dot * rho / static_cast<A>(width);
  if (dweight != nullptr) {
#pragma omp simd
    for (std::int64_t c = 0; c < width; ++c) {
      dweight[c] += static_cast<A>(dy[c]) * cpu::sigmoid(static_cast<A>(gate[c])) *
                    static_cast<A>(x[c]) * rho;
    }
  }
#pragma omp simd
  for (std::int64_t c = 0; c < width; ++c) {
    A s, complement;
    cpu::sigmoid_pair(static_cast<A>(gate[c]), s, complement);
    const A grad = static_cast<A>(dy[c]), weight = static_cast<A>(w[c]),
            xh = static_cast<A>(x[c]) * rho;
    dx[c] = T(rho * (weight * grad * s - xh * mean));
    dgate[c] = T(grad * xh * weight * s * complement);
  }
}

template <class T, class W>
void norm_backward(ThreadPool& pool, const GatedRmsNormBackward& op, const TensorView& partial) {
  using A = acc_t<T>;
  const std::int64_t rows = op.x.dim(0) * op.x.dim(1), width = op.x.dim(2);
  pool.parallel_for(rows, cpu::kSumBlock, [&](std::int64_t begin, std::int64_t end) {
    A* sum = partial.empty() ? nullptr : partial.as<A>() + begin / cpu::kSumBlock * width;
    if (sum != nullptr) std::fill_n(sum, width, A(0));
    for (std::int64_t r = begin; r < end; ++r)
      norm_backward_row<T, W>(op, r, sum);
  });
  if (!partial.empty())
    cpu::add_block_sums(pool, partial.as<A>(), cpu::sum_blocks(rows), width, op.dweight.as<A>());
}

template <class T>
void gate_forward(ThreadPool& pool, const SigmoidGateForward& op) {
  using A = acc_t<T>;
  const T* x = op.x.as<T>();
  const T* gate = op.gate.as<T>();
  T* y = op.y.as<T>();
  pool.parallel_for(op.x.numel(), cpu::row_grain(1), [&](std::int64_t begin, std::int64_t end) {
#pragma omp simd
    for (std::int64_t i = begin; i < end; ++i)
      y[i] = T(static_cast<A>(x[i]) * cpu::sigmoid(static_cast<A>(gate[i])));
  });
}

template <class T>
void gate_backward(ThreadPool& pool, const SigmoidGateBackward& op) {
  using A = acc_t<T>;
  const T* x = op.x.as<T>();
  const T* gate = op.gate.as<T>();
  const T* dy = op.dy.as<T>();
  T* dx = op.dx.as<T>();
  T* dgate = op.dgate.as<T>();
  pool.parallel_for(op.x.numel(), cpu::row_grain(1), [&](std::int64_t begin, std::int64_t end) {
#pragma omp simd
    for (std::int64_t i = begin; i < end; ++i) {
      A s, complement;
      cpu::sigmoid_pair(static_cast<A>(gate[i]), s, complement);
      const A grad = static_cast<A>(dy[i]), value = static_cast<A>(x[i]);
      dx[i] = T(grad * s);
      dgate[i] = T(grad * value * s * complement);
    }
  });
}

}  // namespace

void launch(CpuContext& context, const GatedRmsNormForward& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
      dispatch_weight<T>(op.weight.dtype(),
                         [&]<class W>(TypeTag<W>) { norm_forward<T, W>(pool, op); });
    });
  });
}

void launch(CpuContext& context, const GatedRmsNormBackward& op) {
  const Arena::Mark mark(context.scratch);
  TensorView partial;
  if (!op.dweight.empty()) {
    const std::int64_t blocks = cpu::sum_blocks(op.x.dim(0) * op.x.dim(1));
    partial = context.scratch.take({blocks, op.x.dim(2)}, op.dweight.dtype(), "gated_norm.dweight");
  }
  context.stream.enqueue([op, partial, &pool = context.pool] {
    dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
      dispatch_weight<T>(op.weight.dtype(),
                         [&]<class W>(TypeTag<W>) { norm_backward<T, W>(pool, op, partial); });
    });
  });
}

void launch(CpuContext& context, const SigmoidGateForward& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) { gate_forward<T>(pool, op); });
  });
}

void launch(CpuContext& context, const SigmoidGateBackward& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) { gate_backward<T>(pool, op); });
  });
}

}  // namespace moesaic
