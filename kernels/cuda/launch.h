#pragma once
// What every CUDA launch() does around its kernels. Host code, for .cu and .cpp files of this
// folder.
#include <algorithm>
#include <cstdint>

#include <cuda_runtime.h>

#include "kernels/ops/op.h"
#include "memory/cuda/check.h"

namespace moesaic::cuda {

/// The stream to launch on, with its device made current. Not for dry streams.
inline cudaStream_t native_stream(const CudaContext& context) {
  use_device(context.stream.device());
  return static_cast<cudaStream_t>(context.stream.native());
}

/// True when nothing may reach the device; scratch has been taken by then, so that a dry run
/// measures it.
inline bool is_dry(const CudaContext& context) {
  return context.stream.mode() == Stream::Mode::dry;
}

/// Whether `op` may take a kernel for particular sizes. The choice may depend on sizes, dtypes and alignment only, never on
/// the machine or on data: it decides the bits of the result.
inline bool may_specialise(const CudaContext& context) {
  return context.path != KernelPath::plain;
}
/// The same for a kernel that does the work of several ops.
inline bool may_fuse(const CudaContext& context) {
  return context.path == KernelPath::automatic;
}
/// For ops with more than one kernel: call it where the choice is made, in dry runs too.
template <class Op>
void report_path(const CudaContext& context, const Op&, const char* path) {
  if (context.paths != nullptr) context.paths->ran(Op::kName, path);
}

/// Throws if the launch just made was refused (grid, shared memory, architecture); `kernel` names
/// it.
inline void check_launch(const char* kernel) {
  check_call(static_cast<int>(cudaGetLastError()), kernel);
}

/// Blocks for `work` block-sized pieces in a grid-stride loop: enough to fill the device, never
/// more than there are.
inline unsigned grid_for(const CudaContext& context, std::int64_t work, int blocks_per_sm = 8) {
  return static_cast<unsigned>(
      std::clamp<std::int64_t>(work, 1, std::int64_t{context.num_sms} * blocks_per_sm));
}

inline bool is_aligned(const void* p, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(p) % bytes == 0;
}

}  // namespace moesaic::cuda
