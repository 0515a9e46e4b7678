#pragma once
// The one place where results of CUDA runtime calls are looked at. No toolkit header: a status is
// an int here.
#include "core/base/tensor.h"

namespace moesaic::cuda {

/// Returns on cudaSuccess. Otherwise throws with the call's text, the error's name and description
/// and the current device: ResourceError when memory ran out, UsageError when there is no driver or
/// no device, else InternalError.
void check_call(int status, const char* call);
/// For destructors: logs what check_call() would have thrown.
void log_failed_call(int status, const char* call) noexcept;
/// Makes `device` the current one of the calling thread. Every thread starts with device 0, so
/// every entry point that creates or launches something calls this first.
void use_device(Device device);

}  // namespace moesaic::cuda

/// MOESAIC_CUDA_CALL(cudaMemcpyAsync(...)): runs the call and throws if it failed.
#define MOESAIC_CUDA_CALL(call) ::moesaic::cuda::check_call(static_cast<int>(call), #call)
/// The same where nothing may throw.
#define MOESAIC_CUDA_TEARDOWN(call) ::moesaic::cuda::log_failed_call(static_cast<int>(call), #call)
