#pragma once
// The codes of kernels/ops/quant.h on the device. A = float or double; for float every function gives what the double one
// gives: scales are powers of two, and what underflows has code 0 anyway.
#include <cstdint>

#include <cuda_fp8.h>

#include "kernels/ops/quant.h"

namespace moesaic::cuda {

/// 2^e for e in -127 … 127.
template <class A>
__device__ __forceinline__ A power_of_two(int e);
template <>
__device__ __forceinline__ float power_of_two<float>(int e) {
  return __int_as_float(e > -127 ? (e + 127) << 23 : 1 << 22);
}
template <>
__device__ __forceinline__ double power_of_two<double>(int e) {
  return __longlong_as_double(static_cast<long long>(e + 1023) << 52);
}

/// What a scale code stands for.
template <class A>
__device__ __forceinline__ A e8m0_value(std::uint8_t code) {
  return code == 255 ? static_cast<A>(NAN) : power_of_two<A>(static_cast<int>(code) - 127);
}

template <class A>
__device__ __forceinline__ std::uint8_t e2m1_code(A x) {
  const A a = fabs(x);
  // Midpoints between neighbours; a tie goes to the even code, i.e. up from an odd one.
  const int code = static_cast<int>(a > A(0.25)) + static_cast<int>(a >= A(0.75)) +
                   static_cast<int>(a > A(1.25)) + static_cast<int>(a >= A(1.75)) +
                   static_cast<int>(a > A(2.5)) + static_cast<int>(a >= A(3.5)) +
                   static_cast<int>(a > A(5));
  return static_cast<std::uint8_t>(code | (signbit(x) ? 8 : 0));
}
template <class A>
__device__ __forceinline__ A e2m1_value(std::uint8_t code) {
  const int exponent = (code >> 1) & 3, mantissa = code & 1;
  const A v = exponent == 0 ? A(0.5) * mantissa
                            : (A(1) + A(0.5) * mantissa) * power_of_two<A>(exponent - 1);
  return (code & 8) != 0 ? -v : v;
}

/// Two codes at once: of `low` in the low byte.
__device__ __forceinline__ std::uint16_t e4m3_codes(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(float2{low, high}, __NV_SATFINITE, __NV_E4M3);
}
__device__ __forceinline__ std::uint8_t e4m3_code(float x) {
  return static_cast<std::uint8_t>(e4m3_codes(x, 0.0F));
}
__device__ __forceinline__ std::uint8_t e4m3_code(double x) {
  if (isnan(x)) return 0x7f;
  const double a = fmin(fabs(x), 448.0);
  int exponent = 0;
  frexp(a, &exponent);               // a = f 2^exponent, f in [0.5, 1)
  exponent = max(exponent - 1, -6);  // below 2^-6 the steps stay 2^-9
  const int steps = static_cast<int>(rint(a * power_of_two<double>(3 - exponent)));
  // 16 steps carry into the exponent by themselves.
  const int code = steps < 8 ? steps : ((exponent + 7) << 3) + (steps - 8);
  return static_cast<std::uint8_t>(code | (signbit(x) ? 0x80 : 0));
}
template <class A>
__device__ __forceinline__ A e4m3_value(std::uint8_t code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return static_cast<A>(NAN);
  const A v = exponent == 0 ? mantissa * power_of_two<A>(-9)
                            : (8 + mantissa) * power_of_two<A>(exponent - 10);
  return (code & 0x80) != 0 ? -v : v;
}

/// Exponent e of a = f 2^e with f in [0.5, 1); 0 for infinity.
__device__ __forceinline__ int exponent_of(double a) {
  if (isinf(a)) return 0;
  int e = 0;
  frexp(a, &e);
  return e;
}

/// The shared exponent of a group whose largest magnitude is `amax`, -127 … 127.
__device__ __forceinline__ int mx_exponent(double amax, MxFormat format, ScaleRule rule) {
  if (!(amax > 0)) return -127;
  const int top_exponent = format == MxFormat::mxfp4 ? 2 : 8;
  const double top = format == MxFormat::mxfp4 ? 6.0 : 448.0;
  int e = exponent_of(amax) - 1 - top_exponent;
  if (rule == ScaleRule::ceil && amax > ldexp(top, e)) ++e;
  return min(max(e, -127), 127);
}

/// What the codes of a block are multiplied by.
__device__ __forceinline__ double fp8_scale(double amax, double amax_floor, bool round_up) {
  amax = fmax(amax, amax_floor);
  if (!(amax > 0)) return 1.0;
  const double scale = amax / 448.0;
  if (!round_up) return scale;
  int e = 0;
  if (!isinf(scale) && frexp(scale, &e) == 0.5) return scale;
  return ldexp(1.0, isinf(scale) ? 0 : e);
}

}  // namespace moesaic::cuda
