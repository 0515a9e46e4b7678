#include "kernels/ops/elementwise.h"

#include "kernels/cpu/rows.h"

namespace moesaic {
namespace {

// Calls f(TypeTag<Y>, TypeTag<X>) for two independent floating types.
template <class F>
void dispatch_two(DType y, DType x, F&& f) {
  dispatch_float(y, [&]<class Y>(TypeTag<Y>) {
    dispatch_float(x, [&]<class X>(TypeTag<X>) { f(TypeTag<Y>{}, TypeTag<X>{}); });
  });
}

template <class Body>
void for_ranges(ThreadPool& pool, std::int64_t n, Body body) {
  pool.parallel_for(n, cpu::row_grain(1), body);
}

}  // namespace

void launch(CpuContext& context, const Add& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.y.dtype(), [&]<class T>(TypeTag<T>) {
      using A = acc_t<T>;
      T* y = op.y.as<T>();
      const T* a = op.a.as<T>();
      const T* b = op.b.as<T>();
      for_ranges(pool, op.y.numel(), [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
        for (std::int64_t i = begin; i < end; ++i)
          y[i] = T(static_cast<A>(a[i]) + static_cast<A>(b[i]));
      });
    });
  });
}

void launch(CpuContext& context, const Accumulate& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_two(op.y.dtype(), op.x.dtype(), [&]<class Y, class X>(TypeTag<Y>, TypeTag<X>) {
      using A = std::common_type_t<acc_t<Y>, acc_t<X>>;
      Y* y = op.y.as<Y>();
      const X* x = op.x.as<X>();
      const A alpha = static_cast<A>(op.alpha);
      for_ranges(pool, op.y.numel(), [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
        for (std::int64_t i = begin; i < end; ++i)
          y[i] = Y(static_cast<A>(y[i]) + alpha * static_cast<A>(x[i]));
      });
    });
  });
}

void launch(CpuContext& context, const Cast& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_two(op.y.dtype(), op.x.dtype(), [&]<class Y, class X>(TypeTag<Y>, TypeTag<X>) {
      Y* y = op.y.as<Y>();
      const X* x = op.x.as<X>();
      for_ranges(pool, op.y.numel(), [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
        for (std::int64_t i = begin; i < end; ++i)
          y[i] = Y(static_cast<acc_t<X>>(x[i]));
      });
    });
  });
}

void launch(CpuContext& context, const Fill& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    const auto fill = [&]<class T>(TypeTag<T>, T value) {
      T* y = op.y.as<T>();
      for_ranges(pool, op.y.numel(), [=](std::int64_t begin, std::int64_t end) {
        std::fill(y + begin, y + end, value);
      });
    };
    if (op.y.dtype() == DType::i32)
      return fill(TypeTag<std::int32_t>{}, static_cast<std::int32_t>(op.value));
    dispatch_float(op.y.dtype(), [&]<class T>(TypeTag<T> tag) { fill(tag, T(op.value)); });
  });
}

void launch(CpuContext& context, const Scale& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.y.dtype(), [&]<class T>(TypeTag<T>) {
      using A = acc_t<T>;
      T* y = op.y.as<T>();
      const T* x = op.x.as<T>();
      const A alpha = static_cast<A>(op.alpha) * (op.factor.empty() ? A(1) : op.factor.as<A>()[0]);
      for_ranges(pool, op.y.numel(), [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
        for (std::int64_t i = begin; i < end; ++i)
          y[i] = T(alpha * static_cast<A>(x[i]));
      });
    });
  });
}

}  // namespace moesaic
