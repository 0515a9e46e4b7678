// The CUDA overloads of launch() in a build without the toolkit. They are never reached: a CUDA stream cannot be made
// there (memory/cuda_absent.cpp).
#include "kernels/cuda_handles.h"
#include "kernels/ops/adamw.h"
#include "kernels/ops/balance.h"
#include "kernels/ops/gemm.h"
#include "kernels/ops/muon.h"
#include "kernels/ops/op.h"
#include "kernels/ops/permute.h"
#include "kernels/ops/rms_norm.h"
#include "kernels/ops/router.h"
#include "kernels/ops/topk.h"
#include "kernels/ops/vocab_loss.h"

namespace moesaic {
namespace {
[[noreturn]] void absent() {
  throw UsageError("this moesaic was built without CUDA; build with -DMOESAIC_CUDA=ON");
}
}  // namespace

void launch(CudaContext&, const AdamW&) {
  absent();
}
void launch(CudaContext&, const BalanceHistogram&) {
  absent();
}
void launch(CudaContext&, const BalanceBiasFromHistogram&) {
  absent();
}
void launch(CudaContext&, const BalanceMargins&) {
  absent();
}
void launch(CudaContext&, const BalanceBiasExact&) {
  absent();
}
void launch(CudaContext&, const BalanceBiasSign&) {
  absent();
}
void launch(CudaContext&, const AccumulateCounts&) {
  absent();
}
void launch(CudaContext&, const BalanceFrequency&) {
  absent();
}
void launch(CudaContext&, const Gemm&) {
  absent();
}
void launch(CudaContext&, const MuonUpdate&) {
  absent();
}
void launch(CudaContext&, const NewtonSchulz&) {
  absent();
}
void launch(CudaContext&, const RmsNormForward&) {
  absent();
}
void launch(CudaContext&, const RmsNormBackward&) {
  absent();
}
void launch(CudaContext&, const DispatchPlan&) {
  absent();
}
void launch(CudaContext&, const GatherRows&) {
  absent();
}
void launch(CudaContext&, const CombineRows&) {
  absent();
}
void launch(CudaContext&, const RowWeightForward&) {
  absent();
}
void launch(CudaContext&, const RowWeightBackward&) {
  absent();
}
void launch(CudaContext&, const RouterForward&) {
  absent();
}
void launch(CudaContext&, const ExpertCapacity&) {
  absent();
}
void launch(CudaContext&, const RouterLossForward&) {
  absent();
}
void launch(CudaContext&, const RouterBackward&) {
  absent();
}
void launch(CudaContext&, const TopK&) {
  absent();
}
void launch(CudaContext&, const CrossEntropy&) {
  absent();
}
void launch(CudaContext&, const VocabDivergence&) {
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
