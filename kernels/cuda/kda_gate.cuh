#pragma once
// Sigmoid, SiLU and softplus on the device. Exponentials are of numbers <= 0 only, and 1 - sigma is never formed.
//
// Fast = true takes the hardware's approximations (relative error below 1e-6 for |x| < 10, growing with |x| as the
// rounding of x log2(e) does): for results that are rounded to bf16 or computed from bf16. It keeps kernels that are
// bound by memory from being bound by instructions.
#include <type_traits>

#include <cuda_bf16.h>

namespace moesaic::cuda::kda {

/// Whether elements of this type get the fast functions.
template <class T>
constexpr bool kFastMath = std::is_same_v<T, __nv_bfloat16>;

template <bool Fast, class A>
__device__ __forceinline__ A exp_of(A x) {
  if constexpr (Fast) {
    return __expf(x);
  } else {
    return exp(x);
  }
}
template <bool Fast, class A>
__device__ __forceinline__ A reciprocal(A x) {
  if constexpr (Fast) {
    return __fdividef(1.0F, x);
  } else {
    return A(1) / x;
  }
}

/// s = 1 / (1 + e^-x), complement = 1 / (1 + e^x).
template <bool Fast, class A>
__device__ __forceinline__ void sigmoid_pair(A x, A& s, A& complement) {
  const A e = exp_of<Fast>(x < A(0) ? x : -x);
  const A large = reciprocal<Fast>(A(1) + e), small = e * large;
  s = x < A(0) ? small : large;
  complement = x < A(0) ? large : small;
}
template <bool Fast, class A>
__device__ __forceinline__ A sigmoid(A x) {
  A s, complement;
  sigmoid_pair<Fast>(x, s, complement);
  return s;
}
template <bool Fast, class A>
__device__ __forceinline__ A silu(A x) {
  return x * sigmoid<Fast>(x);
}

/// log(1 + e^x).
template <bool Fast>
__device__ __forceinline__ double softplus(double x) {
  return (x > 0.0 ? x : 0.0) + log1p(exp(x > 0.0 ? -x : x));
}
/// With y = e^-|x|, log(1 + y) = 2 atanh(u), u = y / (2 + y) <= 1/3, by its odd series up to u^17 (remainder below 1e-9):
/// keeps its relative accuracy for small y.
template <bool Fast>
__device__ __forceinline__ float softplus(float x) {
  const float y = exp_of<Fast>(x > 0.0F ? -x : x);
  const float u = y * reciprocal<Fast>(2.0F + y), s = u * u;
  float p = 1.0F / 17.0F;
  p = p * s + 1.0F / 15.0F;
  p = p * s + 1.0F / 13.0F;
  p = p * s + 1.0F / 11.0F;
  p = p * s + 1.0F / 9.0F;
  p = p * s + 1.0F / 7.0F;
  p = p * s + 1.0F / 5.0F;
  p = p * s + 1.0F / 3.0F;
  return (x > 0.0F ? x : 0.0F) + 2.0F * (u + u * s * p);
}

}  // namespace moesaic::cuda::kda
