#pragma once
// Rows of L2 and RMS norms for use inside other CPU kernels. A is the accumulation type; T any floating element type.
#include <cmath>
#include <cstdint>

#include "core/base/dtype.h"

namespace moesaic::cpu {

/// sum of x_c^2, n values.
template <class A, class T>
inline A sum_squares(const T* x, std::int64_t n) noexcept {
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t c = 0; c < n; ++c)
    sum += static_cast<A>(x[c]) * static_cast<A>(x[c]);
  return sum;
}

/// sum of a_c b_c.
template <class A, class T, class U>
inline A dot(const T* a, const U* b, std::int64_t n) noexcept {
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t c = 0; c < n; ++c)
    sum += static_cast<A>(a[c]) * static_cast<A>(b[c]);
  return sum;
}

/// y = x r scale with r = (sum(x^2) + eps)^(-1/2); returns r. y may be x.
template <class A, class T, class U>
inline A l2_norm_row(const T* x, U* y, std::int64_t n, A eps, A scale) noexcept {
  const A r = A(1) / std::sqrt(sum_squares<A>(x, n) + eps);
  const A f = r * scale;
#pragma omp simd
  for (std::int64_t c = 0; c < n; ++c)
    y[c] = U(static_cast<A>(x[c]) * f);
  return r;
}

/// dx = scale r (dy - xh <xh, dy>), xh = x r. dx may be dy or x.
template <class A, class T, class U, class V>
inline void l2_norm_row_backward(
    const T* x, A r, const U* dy, V* dx, std::int64_t n, A scale) noexcept {
  const A m = dot<A>(x, dy, n) * r * r;
  const A f = r * scale;
#pragma omp simd
  for (std::int64_t c = 0; c < n; ++c)
    dx[c] = V(f * (static_cast<A>(dy[c]) - static_cast<A>(x[c]) * m));
}

/// (mean(x^2) + eps)^(-1/2).
template <class A, class T>
inline A inverse_rms(const T* x, std::int64_t n, A eps) noexcept {
  return A(1) / std::sqrt(sum_squares<A>(x, n) / static_cast<A>(n) + eps);
}

}  // namespace moesaic::cpu
