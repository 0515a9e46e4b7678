#pragma once
// Elementary functions with the bits of kernels/cpu/math.h, operation by operation, for results
// that decide something (which expert a token goes to) and so must not depend on the backend. The
// f64 versions are the toolkit's and may differ in the last bit.
#include "kernels/cuda/device.cuh"

namespace moesaic::cuda::as_cpu {

__device__ __forceinline__ double exp(double x) {
  return ::exp(x);
}
__device__ __forceinline__ float exp(float x) {
  const float clamped = x < -104.0F ? -104.0F : (x > 89.0F ? 89.0F : x);
  const float n = rintf(__fmul_rn(clamped, 1.44269504F));
  const float r = __fmaf_rn(n, 2.12194440e-4F, __fmaf_rn(-n, 0.693359375F, clamped));
  float p = 1.9841270e-4F;
  p = __fmaf_rn(p, r, 1.3888889e-3F);
  p = __fmaf_rn(p, r, 8.3333333e-3F);
  p = __fmaf_rn(p, r, 4.1666667e-2F);
  p = __fmaf_rn(p, r, 1.6666667e-1F);
  p = __fmaf_rn(p, r, 0.5F);
  p = __fmaf_rn(p, r, 1.0F);
  p = __fmaf_rn(p, r, 1.0F);
  const int i = static_cast<int>(n), half = i >> 1;
  const float y = __fmul_rn(__fmul_rn(p, __int_as_float((half + 127) << 23)),
                            __int_as_float((i - half + 127) << 23));
  return x != x ? x : y;
}

/// 1 / (1 + e^-x).
template <class A>
__device__ __forceinline__ A sigmoid(A x) {
  const A e = exp(-fabs(x));
  const A s = A(1) / (A(1) + e);
  return x < A(0) ? e * s : s;
}

}  // namespace moesaic::cuda::as_cpu
