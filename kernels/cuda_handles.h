#pragma once
// Library handles of the CUDA backend; cuda/handles.cpp makes them, cuda_absent.cpp refuses.
#include <memory>

#include "kernels/ops/op.h"

namespace moesaic::cuda {
/// cublasLt and its choices of algorithms for one stream (kernels/cuda/blas_lt.h).
void* create_blas_lt(Device device);
void destroy_blas_lt(void* handle) noexcept;
int multiprocessors(Device device);
/// Marks ops and parts of a step as NVTX ranges on the thread that enqueues them.
std::unique_ptr<OpObserver> create_nvtx_observer();
}  // namespace moesaic::cuda
