#include "kernels/cuda/map.cuh"
#include "kernels/ops/elementwise.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

// No pointer is __restrict__: results may lie on operands.

template <class T, class A>
struct AddAt {
  T* y;
  const T* a;
  const T* b;
  template <int N>
  __device__ __forceinline__ void at(std::int64_t i) const {
    auto av = load<N>(a + i);
    const auto bv = load<N>(b + i);
#pragma unroll
    for (int j = 0; j < N; ++j)
      av.v[j] = round_to<T>(widen<A>(av.v[j]) + widen<A>(bv.v[j]));
    store<N>(y + i, av);
  }
};

template <class Y, class X, class A>
struct AccumulateAt {
  Y* y;
  const X* x;
  A alpha;
  template <int N>
  __device__ __forceinline__ void at(std::int64_t i) const {
    auto yv = load<N>(y + i);
    const auto xv = load<N>(x + i);
#pragma unroll
    for (int j = 0; j < N; ++j)
      yv.v[j] = round_to<Y>(widen<A>(yv.v[j]) + alpha * widen<A>(xv.v[j]));
    store<N>(y + i, yv);
  }
};

template <class Y, class X, class A>
struct CastAt {
  Y* y;
  const X* x;
  template <int N>
  __device__ __forceinline__ void at(std::int64_t i) const {
    const auto xv = load<N>(x + i);
    Vec<Y, N> yv;
#pragma unroll
    for (int j = 0; j < N; ++j)
      yv.v[j] = round_to<Y>(widen<A>(xv.v[j]));
    store<N>(y + i, yv);
  }
};

template <class T>
struct FillAt {
  T* y;
  T value;
  template <int N>
  __device__ __forceinline__ void at(std::int64_t i) const {
    Vec<T, N> yv;
#pragma unroll
    for (int j = 0; j < N; ++j)
      yv.v[j] = value;
    store<N>(y + i, yv);
  }
};

template <class T, class A>
struct ScaleAt {
  T* y;
  const T* x;
  const A* factor;
  A alpha;
  template <int N>
  __device__ __forceinline__ void at(std::int64_t i) const {
    const A scale = factor == nullptr ? alpha : alpha * *factor;
    auto v = load<N>(x + i);
#pragma unroll
    for (int j = 0; j < N; ++j)
      v.v[j] = round_to<T>(scale * widen<A>(v.v[j]));
    store<N>(y + i, v);
  }
};

// Calls f(TypeTag<Y>, TypeTag<X>) for two independent floating types.
template <class F>
void dispatch_two(DType y, DType x, F&& f) {
  dispatch_float(y, [&]<class Y>(TypeTag<Y>) {
    dispatch_float(x, [&]<class X>(TypeTag<X>) { f(TypeTag<Y>{}, TypeTag<X>{}); });
  });
}
// Elements per access, from the narrower type.
template <class Y, class X>
constexpr int kWideOfBoth = kWide<Y> > kWide<X> ? kWide<Y> : kWide<X>;

}  // namespace

void launch(CudaContext& context, const Add& op) {
  if (is_dry(context) || op.y.numel() == 0) return;
  dispatch_float(op.y.dtype(), [&]<class T>(TypeTag<T>) {
    map<kWide<T>>(context,
                  "kernel add",
                  op.y.numel(),
                  {op.y.data(), op.a.data(), op.b.data()},
                  AddAt<device_t<T>, acc_t<T>>{
                      device_data<T>(op.y), device_data<T>(op.a), device_data<T>(op.b)});
  });
}

void launch(CudaContext& context, const Accumulate& op) {
  if (is_dry(context) || op.y.numel() == 0) return;
  dispatch_two(op.y.dtype(), op.x.dtype(), [&]<class Y, class X>(TypeTag<Y>, TypeTag<X>) {
    using A = std::common_type_t<acc_t<Y>, acc_t<X>>;
    map<kWideOfBoth<Y, X>>(
        context,
        "kernel accumulate",
        op.y.numel(),
        {op.y.data(), op.x.data()},
        AccumulateAt<device_t<Y>, device_t<X>, A>{
            device_data<Y>(op.y), device_data<X>(op.x), static_cast<A>(op.alpha)});
  });
}

void launch(CudaContext& context, const Cast& op) {
  if (is_dry(context) || op.y.numel() == 0) return;
  dispatch_two(op.y.dtype(), op.x.dtype(), [&]<class Y, class X>(TypeTag<Y>, TypeTag<X>) {
    map<kWideOfBoth<Y, X>>(
        context,
        "kernel cast",
        op.y.numel(),
        {op.y.data(), op.x.data()},
        CastAt<device_t<Y>, device_t<X>, acc_t<X>>{device_data<Y>(op.y), device_data<X>(op.x)});
  });
}

void launch(CudaContext& context, const Fill& op) {
  if (is_dry(context) || op.y.numel() == 0) return;
  // Values go as bits: every type of one size shares a kernel.
  const auto fill = [&]<class Bits>(Bits bits) {
    auto* y = reinterpret_cast<Bits*>(op.y.data());
    map<kWide<Bits>>(context, "kernel fill", op.y.numel(), {y}, FillAt<Bits>{y, bits});
  };
  switch (op.y.dtype()) {
    case DType::i32:
      return fill(std::bit_cast<std::uint32_t>(static_cast<std::int32_t>(op.value)));
    case DType::f32:
      return fill(std::bit_cast<std::uint32_t>(static_cast<float>(op.value)));
    case DType::bf16:
      return fill(bf16(op.value).bits);
    default:
      return fill(std::bit_cast<std::uint64_t>(op.value));
  }
}

void launch(CudaContext& context, const Scale& op) {
  if (is_dry(context) || op.y.numel() == 0) return;
  dispatch_float(op.y.dtype(), [&]<class T>(TypeTag<T>) {
    using A = acc_t<T>;
    map<kWide<T>>(context,
                  "kernel scale",
                  op.y.numel(),
                  {op.y.data(), op.x.data()},
                  ScaleAt<device_t<T>, A>{device_data<T>(op.y),
                                          device_data<T>(op.x),
                                          op.factor.as<A>(),
                                          static_cast<A>(op.alpha)});
  });
}

}  // namespace moesaic
