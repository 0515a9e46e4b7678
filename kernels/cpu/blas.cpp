#include "kernels/cpu/blas.h"

#include <type_traits>

#include <cblas.h>

namespace moesaic::cpu {

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
               std::int64_t ldc) {
  const auto ta = transpose_a ? CblasTrans : CblasNoTrans;
  const auto tb = transpose_b ? CblasTrans : CblasNoTrans;
  const auto i = [](std::int64_t v) { return static_cast<blasint>(v); };
  if constexpr (std::is_same_v<T, double>) {
    cblas_dgemm(
        CblasRowMajor, ta, tb, i(m), i(n), i(k), alpha, a, i(lda), b, i(ldb), beta, c, i(ldc));
  } else {
    cblas_sgemm(
        CblasRowMajor, ta, tb, i(m), i(n), i(k), alpha, a, i(lda), b, i(ldb), beta, c, i(ldc));
  }
}
template void blas_gemm<float>(bool,
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
template void blas_gemm<double>(bool,
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
