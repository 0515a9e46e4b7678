#pragma once
// Elementary functions for the CPU kernels. The float versions are branch-free, so that loops over them vectorise; the
// double versions are the C library's, as befits the oracle.
#include <bit>
#include <cmath>
#include <cstdint>

namespace moesaic::cpu {

/// e^x. float: relative error below 2e-7; below -87.33 the result is 0, above 88.72 it is infinite; NaN stays NaN.
inline double exp(double x) noexcept {
  return std::exp(x);
}
inline float exp(float x) noexcept {
  // x = n ln2 + r, |r| <= ln2/2; e^r by its Taylor polynomial of degree 7 (remainder below 1e-8), then scaled by 2^n in
  // two halves so that the largest results do not overflow on the way.
  const float clamped = x < -104.0F ? -104.0F : (x > 89.0F ? 89.0F : x);
  const float n = std::nearbyint(clamped * 1.44269504F);
  const float r = (clamped - n * 0.693359375F) + n * 2.12194440e-4F;
  float p = 1.9841270e-4F;
  p = p * r + 1.3888889e-3F;
  p = p * r + 8.3333333e-3F;
  p = p * r + 4.1666667e-2F;
  p = p * r + 1.6666667e-1F;
  p = p * r + 0.5F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  const auto i = static_cast<std::int32_t>(n);
  const std::int32_t half = i >> 1;
  const float a = std::bit_cast<float>((half + 127) << 23);
  const float b = std::bit_cast<float>((i - half + 127) << 23);
  const float y = p * a * b;
  return x != x ? x : y;
}

/// 1 / (1 + e^-x), without overflow: the exponential is always of a negative number.
template <class T>
inline T sigmoid(T x) noexcept {
  const T e = exp(-std::fabs(x));  // <= 1
  const T s = T(1) / (T(1) + e);
  return x < T(0) ? e * s : s;
}

/// 1 / (1 + e^-x) and its complement 1 / (1 + e^x), neither formed by subtraction from 1.
template <class T>
inline void sigmoid_pair(T x, T& s, T& complement) noexcept {
  const T e = exp(-std::fabs(x));
  const T r = T(1) / (T(1) + e), small = e * r;
  s = x < T(0) ? small : r;
  complement = x < T(0) ? r : small;
}

/// tanh a for 0 <= a < 0.35 by the odd series.
inline float tanh_small(float a) noexcept {
  const float z = a * a;
  return a * (1.0F + z * (-0.333333333F +
                          z * (0.133333333F +
                               z * (-0.0539682540F + z * (0.0218694885F + z * -0.00886323553F)))));
}

/// tanh x. float: small arguments by the odd series, else (1-e)/(1+e) with e = e^-2|x|; relative error below 4e-7.
inline double tanh(double x) noexcept {
  return std::tanh(x);
}
inline float tanh(float x) noexcept {
  const float a = std::fabs(x);
  const float e = exp(-2.0F * a);
  const float big = (1.0F - e) / (1.0F + e);
  const float t = a < 0.35F ? tanh_small(a) : big;
  return std::copysign(t, x);
}

/// d tanh(x) / dx = 4 e / (1 + e)^2 with e = e^-2|x|: keeps its relative accuracy where tanh is close to 1.
template <class T>
inline T tanh_slope(T x) noexcept {
  const T e = exp(T(-2) * std::fabs(x));
  return T(4) * e / ((T(1) + e) * (T(1) + e));
}

/// tanh x and its derivative, for float from one exponential and one division.
inline void tanh_and_slope(double x, double& value, double& slope) noexcept {
  value = std::tanh(x);
  slope = tanh_slope(x);
}
inline void tanh_and_slope(float x, float& value, float& slope) noexcept {
  const float a = std::fabs(x);
  const float e = exp(-2.0F * a);
  const float r = 1.0F / (1.0F + e);
  value = std::copysign(a < 0.35F ? tanh_small(a) : (1.0F - e) * r, x);
  slope = 4.0F * e * r * r;
}

/// log(1 + e^x), exact for either sign; its derivative is sigmoid(x).
template <class T>
inline T softplus(T x) noexcept {
  return (x > T(0) ? x : T(0)) + std::log1p(exp(x > T(0) ? -x : x));
}

template <class T>
inline T silu(T x) noexcept {
  return x * sigmoid(x);
}

}  // namespace moesaic::cpu
