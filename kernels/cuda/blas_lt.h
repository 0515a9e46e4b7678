#pragma once
// What CudaContext::blas_lt points to: the cublasLt handle of one stream and the products it has
// met.
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>

#include <cublasLt.h>

#include "core/base/dtype.h"
#include "memory/owned.h"

namespace moesaic::cuda {

/// Throws InternalError with the call's text and cublas's name for the status (ResourceError when
/// memory ran out).
void check_blas(cublasStatus_t status, const char* call);

/// Everything that the choice of an algorithm may depend on.
struct GemmKey {
  std::int64_t m = 0, n = 0, k = 0;
  std::int64_t batch = 1;  ///< for which the algorithm is chosen
  std::int64_t pitch_a = 0, pitch_b = 0, pitch_c = 0;
  bool transpose_a = false, transpose_b = false, accumulate = false;
  DType input = DType::f32, output = DType::f32;
  std::uint32_t align_a = 0, align_b = 0, align_c = 0;  ///< bytes
  auto operator<=>(const GemmKey&) const = default;
};

struct BlasLt {
  Owned<cublasLtHandle_t, &cublasLtDestroy> handle;
  std::map<GemmKey, cublasLtMatmulAlgo_t>
      choices;  ///< used by the one host thread that feeds the stream
};

}  // namespace moesaic::cuda

#define MOESAIC_BLAS_CALL(call) ::moesaic::cuda::check_blas(call, #call)
