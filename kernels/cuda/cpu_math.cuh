#pragma once
// Elementary functions with the bits of kernels/cpu/math.h, operation by operation, for results
// that decide something (which expert a token goes to) and so must not depend on the backend. The
// f64 versions are the toolkit's and may differ in the last bit.
#include "kernels/cuda/device.cuh"

namespace moesaic::cuda::as_cpu {

__device__ __forceinline__ double exp(double x) {
  return ::exp(x);
}
__device__ __forceinline__ float exp_of_remainder(float r) {
  float p = 1.9841270e-4F;
  p = __fmaf_rn(p, r, 1.3888889e-3F);
  p = __fmaf_rn(p, r, 8.3333333e-3F);
  p = __fmaf_rn(p, r, 4.1666667e-2F);
  p = __fmaf_rn(p, r, 1.6666667e-1F);
  p = __fmaf_rn(p, r, 0.5F);
  p = __fmaf_rn(p, r, 1.0F);
  return __fmaf_rn(p, r, 1.0F);
}
/// p 2^i in two steps, for i beyond the exponents of normal numbers.
__device__ __forceinline__ float scaled(float p, int i) {
  const int half = i >> 1;
  return __fmul_rn(__fmul_rn(p, __int_as_float((half + 127) << 23)),
                   __int_as_float((i - half + 127) << 23));
}
__device__ __forceinline__ float exp(float x) {
  const float clamped = x < -104.0F ? -104.0F : (x > 89.0F ? 89.0F : x);
  const float n = rintf(__fmul_rn(clamped, 1.44269504F));
  const float r = __fmaf_rn(n, 2.12194440e-4F, __fmaf_rn(-n, 0.693359375F, clamped));
  return x != x ? x : scaled(exp_of_remainder(r), static_cast<int>(n));
}

/// 1 / (1 + e^-x).
__device__ __forceinline__ double sigmoid(double x) {
  const double e = exp(-fabs(x));
  const double s = 1.0 / (1.0 + e);
  return x < 0.0 ? e * s : s;
}
/// With shorter ways to the same bits: the argument of the exponential is never above 0, a sum with
/// 1.5 * 2^23 rounds to an integer, and between 1 and 2 one Newton step makes the reciprocal exact.
__device__ __forceinline__ float sigmoid(float x) {
  constexpr float kMagic = 12582912.0F;
  const float clamped = fmaxf(-fabsf(x), -104.0F);
  const float shifted = __fadd_rn(__fmul_rn(clamped, 1.44269504F), kMagic);
  const float n = __fadd_rn(shifted, -kMagic);
  const float r = __fmaf_rn(n, 2.12194440e-4F, __fmaf_rn(-n, 0.693359375F, clamped));
  const int i = __float_as_int(shifted) - __float_as_int(kMagic);
  const float e = scaled(exp_of_remainder(r), i);
  const float sum = 1.0F + e;
  float s;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(sum));
  s = __fmaf_rn(s, __fmaf_rn(-sum, s, 1.0F), s);
  const float y = x < 0.0F ? __fmul_rn(e, s) : s;
  return x != x ? x : y;
}

}  // namespace moesaic::cuda::as_cpu
