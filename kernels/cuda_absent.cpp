// The CUDA overloads of launch() in a build without the toolkit. They are never reached: a CUDA stream cannot be made
// there (memory/cuda_absent.cpp).
#include "kernels/cuda_handles.h"
#include "kernels/ops/adamw.h"
#include "kernels/ops/gemm.h"
#include "kernels/ops/kda_chunk.h"
#include "kernels/ops/kda_prepare.h"
#include "kernels/ops/op.h"
#include "kernels/ops/rms_norm.h"
#include "kernels/ops/short_conv.h"
#include "kernels/ops/topk.h"

namespace moesaic {
namespace {
[[noreturn]] void absent() {
  throw UsageError("this moesaic was built without CUDA; build with -DMOESAIC_CUDA=ON");
}
}  // namespace

void launch(CudaContext&, const AdamW&) {
  absent();
}
void launch(CudaContext&, const Gemm&) {
  absent();
}
void launch(CudaContext&, const KdaChunkForward&) {
  absent();
}
void launch(CudaContext&, const KdaChunkBackward&) {
  absent();
}
void launch(CudaContext&, const KdaStep&) {
  absent();
}
void launch(CudaContext&, const KdaPrepareForward&) {
  absent();
}
void launch(CudaContext&, const KdaPrepareBackward&) {
  absent();
}
void launch(CudaContext&, const RmsNormForward&) {
  absent();
}
void launch(CudaContext&, const RmsNormBackward&) {
  absent();
}
void launch(CudaContext&, const ShortConvForward&) {
  absent();
}
void launch(CudaContext&, const ShortConvBackward&) {
  absent();
}
void launch(CudaContext&, const ShortConvTail&) {
  absent();
}
void launch(CudaContext&, const TopK&) {
  absent();
}

namespace cuda {
void* create_blas_lt(Device) {
  absent();
}
void destroy_blas_lt(void*) noexcept {}
int multiprocessors(Device) {
  absent();
}
}  // namespace cuda

}  // namespace moesaic
