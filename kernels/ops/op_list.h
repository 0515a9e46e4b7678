#pragma once
// Every op of moesaic. A new op is one line in AllOps (and the include of its header, when that is new); a test compares
// the list with the headers of this folder.
#include <string>
#include <vector>

#include "kernels/ops/adamw.h"
#include "kernels/ops/gemm.h"
#include "kernels/ops/op.h"
#include "kernels/ops/rms_norm.h"
#include "kernels/ops/topk.h"

namespace moesaic {

template <class... Ops>
struct OpList {};

using AllOps = OpList<  //
    AdamW,              //
    Gemm,               //
    RmsNormBackward,    //
    RmsNormForward,     //
    TopK                //
    >;

/// kName of every op, in the order of the list.
std::vector<std::string> op_names();

/// kName of every op without a CUDA kernel (no launch(CudaContext&, …) in its header). `device: cuda` is refused with
/// this list at start while it is not empty.
std::vector<std::string> missing_cuda_ops();

}  // namespace moesaic
