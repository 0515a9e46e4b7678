#pragma once
// Library handles of the CUDA backend; cuda/handles.cpp makes them, cuda_absent.cpp refuses.
#include "core/base/tensor.h"

namespace moesaic::cuda {
/// cublasLt and its choices of algorithms for one stream (kernels/cuda/blas_lt.h).
void* create_blas_lt(Device device);
void destroy_blas_lt(void* handle) noexcept;
int multiprocessors(Device device);
}  // namespace moesaic::cuda
