#pragma once
// Sigmoid and tanh with their complements and slopes on the device. kFast = approximate exponential and division, for results
// that are rounded to bf16 anyway: relative error below 1e-5 where the result is not tiny itself.
#include <cmath>

namespace moesaic::cuda {

template <bool kFast>
__device__ __forceinline__ float exp_of(float x) {
  if constexpr (kFast) return __expf(x);
  return expf(x);
}
template <bool kFast>
__device__ __forceinline__ double exp_of(double x) {
  return exp(x);
}
template <bool kFast>
__device__ __forceinline__ float divide(float a, float b) {
  if constexpr (kFast) return __fdividef(a, b);
  return a / b;
}
template <bool kFast>
__device__ __forceinline__ double divide(double a, double b) {
  return a / b;
}

/// 1 / (1 + e^-x) without overflow: the exponential is always of a negative number.
template <bool kFast, class A>
__device__ __forceinline__ A sigmoid(A x) {
  const A e = exp_of<kFast>(-fabs(x));
  return divide<kFast>(x < A(0) ? e : A(1), A(1) + e);
}
/// 1 / (1 + e^-x) and its complement 1 / (1 + e^x), neither formed by subtraction from 1.
template <bool kFast, class A>
__device__ __forceinline__ void sigmoid_pair(A x, A& s, A& complement) {
  const A e = exp_of<kFast>(-fabs(x));
  const A r = divide<kFast>(A(1), A(1) + e), small = e * r;
  s = x < A(0) ? small : r;
  complement = x < A(0) ? r : small;
}

/// tanh x and its derivative from one exponential; for float, small arguments go by the odd series.
template <bool kFast>
__device__ __forceinline__ void tanh_and_slope(double x, double& value, double& slope) {
  value = tanh(x);
  const double e = exp(-2.0 * fabs(x));
  slope = 4.0 * e / ((1.0 + e) * (1.0 + e));
}
template <bool kFast>
__device__ __forceinline__ void tanh_and_slope(float x, float& value, float& slope) {
  constexpr float kSmall = 0.35F;  // above it 1 - e loses less than two bits
  const float a = fabsf(x), z = a * a;
  const float e = exp_of<kFast>(-2.0F * a);
  const float r = divide<kFast>(1.0F, 1.0F + e);
  const float series =
      a * (1.0F + z * (-0.333333333F +
                       z * (0.133333333F +
                            z * (-0.0539682540F + z * (0.0218694885F + z * -0.00886323553F)))));
  value = copysignf(a < kSmall ? series : (1.0F - e) * r, x);
  slope = 4.0F * e * r * r;
}

}  // namespace moesaic::cuda
