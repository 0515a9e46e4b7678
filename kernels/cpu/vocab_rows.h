#pragma once
// What the losses over the vocabulary share.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "core/base/dtype.h"
#include "core/base/tensor.h"
#include "kernels/cpu/math.h"

namespace moesaic::cpu {

/// A sum of exponentials relative to the largest argument.
template <class A>
struct ExpSum {
  A largest, sum;
};

/// Of a row; (-infinity, 0) for nothing but -infinity.
template <class A, class T>
ExpSum<A> exp_sum(const T* x, std::int64_t n) {
  A largest = static_cast<A>(x[0]);
#pragma omp simd reduction(max : largest)
  for (std::int64_t v = 0; v < n; ++v)
    largest = static_cast<A>(x[v]) > largest ? static_cast<A>(x[v]) : largest;
  const A from = largest == -std::numeric_limits<A>::infinity() ? A(0) : largest;
  // In blocks: one f32 sum over a whole vocabulary loses 2e-5 of it where a few words outweigh the others.
  constexpr std::int64_t kBlock = 4096;
  A sum = 0;
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    A of_block = 0;
#pragma omp simd reduction(+ : of_block)
    for (std::int64_t v = begin; v < std::min(n, begin + kBlock); ++v)
      of_block += exp(static_cast<A>(x[v]) - from);
    sum += of_block;
  }
  return {largest, sum};
}

/// The log-sum-exp; a row of nothing but -infinity has none.
template <class A>
A log_of(const ExpSum<A>& x) {
  if (x.largest == -std::numeric_limits<A>::infinity()) return std::numeric_limits<A>::quiet_NaN();
  return x.largest + std::log(x.sum);
}

/// sum += the rows' results in row order, in double, so that neither threads nor the chunk's length show in the sum's order.
template <class A>
void add_rows(const TensorView& per_row, const TensorView& sum) {
  double total = 0;
  for (std::int64_t r = 0; r < per_row.dim(0); ++r)
    total += static_cast<double>(per_row.as<A>()[r]);
  sum.as<A>()[0] = static_cast<A>(static_cast<double>(sum.as<A>()[0]) + total);
}

/// grad_scale / divisor, or 0 when no gradient is wanted.
template <class A, class Op>
A gradient_factor(const Op& op) {
  return op.dlogits.empty()
             ? A(0)
             : static_cast<A>(op.grad_scale / static_cast<double>(op.divisor.template as<A>()[0]));
}

/// Calls f with the types of logits and dlogits: equal, or f32 and bf16.
template <class F>
void dispatch_logits(const ConstTensorView& logits, const ConstTensorView& dlogits, F&& f) {
  const DType gradient = dlogits.empty() ? logits.dtype() : dlogits.dtype();
  dispatch_float(logits.dtype(), [&]<class T>(TypeTag<T> tag) {
    if constexpr (std::is_same_v<T, float>) {
      if (gradient == DType::bf16) return f(tag, TypeTag<bf16>{});
    }
    f(tag, tag);
  });
}

}  // namespace moesaic::cpu
