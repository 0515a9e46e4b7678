#include <memory>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "kernels/cuda/blas_lt.h"
#include "kernels/cuda_handles.h"
#include "memory/cuda/check.h"

namespace moesaic::cuda {

void check_blas(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const auto text = fmt::format("{} failed with {} ({}): {}",
                                call,
                                cublasLtGetStatusName(status),
                                static_cast<int>(status),
                                cublasLtGetStatusString(status));
  if (status == CUBLAS_STATUS_ALLOC_FAILED) throw ResourceError(text);
  throw InternalError(text);
}

void* create_blas_lt(Device device) {
  use_device(device);
  auto blas = std::make_unique<BlasLt>();
  cublasLtHandle_t handle = nullptr;
  MOESAIC_BLAS_CALL(cublasLtCreate(&handle));
  blas->handle = Owned<cublasLtHandle_t, &cublasLtDestroy>(handle);
  return blas.release();
}

void destroy_blas_lt(void* handle) noexcept {
  delete static_cast<BlasLt*>(handle);
}

int multiprocessors(Device device) {
  int count = 0;
  MOESAIC_CUDA_CALL(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device.ordinal));
  return count;
}

}  // namespace moesaic::cuda
