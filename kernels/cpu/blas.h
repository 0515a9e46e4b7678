#pragma once
#include <cstdint>

namespace moesaic::cpu {

/// c = beta c + alpha op(a) op(b) by the BLAS library on the calling thread; row-major with leading dimensions. c [m, n];
/// a [m, k], or [k, m] when transpose_a; b [k, n], or [n, k] when transpose_b. c is not read when beta is 0. T = float |
/// double. For use inside the loops of other CPU kernels: the bits depend on m, n, k and the transpositions, so a caller
/// whose row count varies must pad to a fixed m.
template <class T>
void blas_gemm(bool transpose_a,
               bool transpose_b,
               std::int64_t m,
               std::int64_t n,
               std::int64_t k,
               T alpha,
               const T* a,
               std::int64_t lda,
               const T* b,
               std::int64_t ldb,
               T beta,
               T* c,
               std::int64_t ldc);

extern template void blas_gemm<float>(bool,
                                      bool,
                                      std::int64_t,
                                      std::int64_t,
                                      std::int64_t,
                                      float,
                                      const float*,
                                      std::int64_t,
                                      const float*,
                                      std::int64_t,
                                      float,
                                      float*,
                                      std::int64_t);
extern template void blas_gemm<double>(bool,
                                       bool,
                                       std::int64_t,
                                       std::int64_t,
                                       std::int64_t,
                                       double,
                                       const double*,
                                       std::int64_t,
                                       const double*,
                                       std::int64_t,
                                       double,
                                       double*,
                                       std::int64_t);

}  // namespace moesaic::cpu
