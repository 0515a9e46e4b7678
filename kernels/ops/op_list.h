#pragma once
// Every op of moesaic. A new op is one line in AllOps (and the include of its header, when that is new); a test compares
// the list with the headers of this folder.
#include <string>
#include <vector>

#include "kernels/ops/adamw.h"
#include "kernels/ops/attention.h"
#include "kernels/ops/attn_res.h"
#include "kernels/ops/balance.h"
#include "kernels/ops/clip.h"
#include "kernels/ops/concat.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/embedding.h"
#include "kernels/ops/exchange.h"
#include "kernels/ops/gated_norm.h"
#include "kernels/ops/gemm.h"
#include "kernels/ops/glu.h"
#include "kernels/ops/grouped_gemm.h"
#include "kernels/ops/grouped_glu.h"
#include "kernels/ops/guard.h"
#include "kernels/ops/head_linear.h"
#include "kernels/ops/indexer.h"
#include "kernels/ops/initial_values.h"
#include "kernels/ops/kda_chunk.h"
#include "kernels/ops/kda_prepare.h"
#include "kernels/ops/kda_segment.h"
#include "kernels/ops/layer_norm.h"
#include "kernels/ops/member_scalars.h"
#include "kernels/ops/muon.h"
#include "kernels/ops/op.h"
#include "kernels/ops/permute.h"
#include "kernels/ops/qk_clip.h"
#include "kernels/ops/quant.h"
#include "kernels/ops/rms_norm.h"
#include "kernels/ops/rope.h"
#include "kernels/ops/router.h"
#include "kernels/ops/short_conv.h"
#include "kernels/ops/sparse_mla.h"
#include "kernels/ops/topk.h"
#include "kernels/ops/vocab_block.h"
#include "kernels/ops/vocab_loss.h"

namespace moesaic {

template <class... Ops>
struct OpList {};

// The empty comments keep one op on a line.
using AllOps = OpList<            //
    Accumulate,                   //
    AccumulateCounts,             //
    AdamW,                        //
    Add,                          //
    AttentionBackward,            //
    AttentionForward,             //
    AttnResBackward,              //
    AttnResForward,               //
    BalanceBiasExact,             //
    BalanceBiasFromHistogram,     //
    BalanceBiasSign,              //
    BalanceFrequency,             //
    BalanceHistogram,             //
    BalanceMargins,               //
    ByteChecksum,                 //
    Cast,                         //
    ClipFactor,                   //
    CombineRows,                  //
    ConcatColumns,                //
    CopyHeadColumns,              //
    CrossEntropy,                 //
    DequantizeFp8Block,           //
    DequantizeMx,                 //
    DispatchPlan,                 //
    EmbeddingBackward,            //
    EmbeddingForward,             //
    ExchangeChoices,              //
    ExchangeCounts,               //
    ExchangeGroups,               //
    ExpertCapacity,               //
    ExpertPlaces,                 //
    Fill,                         //
    GatedRmsNormBackward,         //
    GatedRmsNormForward,          //
    GatherRows,                   //
    Gemm,                         //
    GluBackward,                  //
    GluForward,                   //
    GroupedGluBackward,           //
    GroupedGluForward,            //
    GroupedLinearBackwardInput,   //
    GroupedLinearBackwardWeight,  //
    GroupedLinearForward,         //
    GuardFinite,                  //
    HeadLinear,                   //
    HeadLinearBackwardWeight,     //
    IndexerLoss,                  //
    IndexerSelect,                //
    InitialValues,                //
    KdaChunkBackward,             //
    KdaChunkForward,              //
    KdaPrepareBackward,           //
    KdaPrepareForward,            //
    KdaSegmentChain,              //
    KdaSegmentGradient,           //
    KdaSegmentMap,                //
    KdaStep,                      //
    L2NormBackward,               //
    L2NormForward,                //
    LayerNormBackward,            //
    LayerNormForward,             //
    MemberScalars,                //
    MovingAverage,                //
    MuonUpdate,                   //
    NewtonSchulz,                 //
    QkClip,                       //
    QuantizeFp8Block,             //
    QuantizeMx,                   //
    RmsNormBackward,              //
    RmsNormForward,               //
    Rope,                         //
    RouterBackward,               //
    RouterForward,                //
    RouterLossForward,            //
    RowWeightBackward,            //
    RowWeightForward,             //
    Scale,                        //
    ShortConvBackward,            //
    ShortConvForward,             //
    ShortConvTail,                //
    SigmoidGateBackward,          //
    SigmoidGateForward,           //
    SparseMlaBackward,            //
    SparseMlaForward,             //
    SplitColumns,                 //
    SumOfSquares,                 //
    TopK,                         //
    VocabBlockCrossEntropy,       //
    VocabBlockSums,               //
    VocabDivergence               //
    >;

/// kName of every op, in the order of the list.
std::vector<std::string> op_names();

/// kName of every op without a CUDA kernel (no launch(CudaContext&, …) in its header). `device: cuda` is refused with
/// this list at start while it is not empty.
std::vector<std::string> missing_cuda_ops();

}  // namespace moesaic
