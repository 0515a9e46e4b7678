// The CUDA overloads of launch() in a build without the toolkit. They are never reached: a CUDA stream cannot be made
// there (memory/cuda_absent.cpp).
#include "kernels/cuda_handles.h"
#include "kernels/ops/op_list.h"

namespace moesaic {
namespace {
[[noreturn]] void absent() {
  throw UsageError("this moesaic was built without CUDA; build with -DMOESAIC_CUDA=ON");
}
}  // namespace

// One line per op of op_list.h; a build without CUDA that lacks one does not link.
#define MOESAIC_ABSENT(Op)                \
  void launch(CudaContext&, const Op&) { \
    absent();                             \
  }
MOESAIC_ABSENT(Accumulate)
MOESAIC_ABSENT(AccumulateCounts)
MOESAIC_ABSENT(AdamW)
MOESAIC_ABSENT(Add)
MOESAIC_ABSENT(AttentionBackward)
MOESAIC_ABSENT(AttentionForward)
MOESAIC_ABSENT(AttnResBackward)
MOESAIC_ABSENT(AttnResForward)
MOESAIC_ABSENT(BalanceBiasExact)
MOESAIC_ABSENT(BalanceBiasFromHistogram)
MOESAIC_ABSENT(BalanceBiasSign)
MOESAIC_ABSENT(BalanceFrequency)
MOESAIC_ABSENT(BalanceHistogram)
MOESAIC_ABSENT(BalanceMargins)
MOESAIC_ABSENT(ByteChecksum)
MOESAIC_ABSENT(Cast)
MOESAIC_ABSENT(ClipFactor)
MOESAIC_ABSENT(CombineRows)
MOESAIC_ABSENT(ConcatColumns)
MOESAIC_ABSENT(CopyHeadColumns)
MOESAIC_ABSENT(CrossEntropy)
MOESAIC_ABSENT(DequantizeFp8Block)
MOESAIC_ABSENT(DequantizeMx)
MOESAIC_ABSENT(DispatchPlan)
MOESAIC_ABSENT(EmbeddingBackward)
MOESAIC_ABSENT(EmbeddingForward)
MOESAIC_ABSENT(ExchangeChoices)
MOESAIC_ABSENT(ExchangeCounts)
MOESAIC_ABSENT(ExchangeGroups)
MOESAIC_ABSENT(ExpertCapacity)
MOESAIC_ABSENT(ExpertPlaces)
MOESAIC_ABSENT(Fill)
MOESAIC_ABSENT(GatedRmsNormBackward)
MOESAIC_ABSENT(GatedRmsNormForward)
MOESAIC_ABSENT(GatherRows)
MOESAIC_ABSENT(Gemm)
MOESAIC_ABSENT(GluBackward)
MOESAIC_ABSENT(GluForward)
MOESAIC_ABSENT(GroupedGluBackward)
MOESAIC_ABSENT(GroupedGluForward)
MOESAIC_ABSENT(GroupedLinearBackwardInput)
MOESAIC_ABSENT(GroupedLinearBackwardWeight)
MOESAIC_ABSENT(GroupedLinearForward)
MOESAIC_ABSENT(GuardFinite)
MOESAIC_ABSENT(HeadLinear)
MOESAIC_ABSENT(HeadLinearBackwardWeight)
MOESAIC_ABSENT(IndexerLoss)
MOESAIC_ABSENT(IndexerSelect)
MOESAIC_ABSENT(InitialValues)
MOESAIC_ABSENT(KdaChunkBackward)
MOESAIC_ABSENT(KdaChunkForward)
MOESAIC_ABSENT(KdaPrepareBackward)
MOESAIC_ABSENT(KdaPrepareForward)
MOESAIC_ABSENT(KdaSegmentChain)
MOESAIC_ABSENT(KdaSegmentGradient)
MOESAIC_ABSENT(KdaSegmentMap)
MOESAIC_ABSENT(KdaStep)
MOESAIC_ABSENT(L2NormBackward)
MOESAIC_ABSENT(L2NormForward)
MOESAIC_ABSENT(LayerNormBackward)
MOESAIC_ABSENT(LayerNormForward)
MOESAIC_ABSENT(MemberScalars)
MOESAIC_ABSENT(MovingAverage)
MOESAIC_ABSENT(MuonUpdate)
MOESAIC_ABSENT(NewtonSchulz)
MOESAIC_ABSENT(QkClip)
MOESAIC_ABSENT(QuantizeFp8Block)
MOESAIC_ABSENT(QuantizeMx)
MOESAIC_ABSENT(RmsNormBackward)
MOESAIC_ABSENT(RmsNormForward)
MOESAIC_ABSENT(Rope)
MOESAIC_ABSENT(RouterBackward)
MOESAIC_ABSENT(RouterForward)
MOESAIC_ABSENT(RouterLossForward)
MOESAIC_ABSENT(RowWeightBackward)
MOESAIC_ABSENT(RowWeightForward)
MOESAIC_ABSENT(Scale)
MOESAIC_ABSENT(ShortConvBackward)
MOESAIC_ABSENT(ShortConvForward)
MOESAIC_ABSENT(ShortConvTail)
MOESAIC_ABSENT(SigmoidGateBackward)
MOESAIC_ABSENT(SigmoidGateForward)
MOESAIC_ABSENT(SparseMlaBackward)
MOESAIC_ABSENT(SparseMlaForward)
MOESAIC_ABSENT(SplitColumns)
MOESAIC_ABSENT(SumOfSquares)
MOESAIC_ABSENT(TopK)
MOESAIC_ABSENT(VocabBlockCrossEntropy)
MOESAIC_ABSENT(VocabBlockSums)
MOESAIC_ABSENT(VocabDivergence)
#undef MOESAIC_ABSENT

namespace cuda {
void* create_blas_lt(Device) {
  absent();
}
void destroy_blas_lt(void*) noexcept {}
int multiprocessors(Device) {
  absent();
}
std::unique_ptr<OpObserver> create_nvtx_observer() {
  absent();
}
}  // namespace cuda

}  // namespace moesaic
