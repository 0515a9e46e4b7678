#pragma once
// Tensor-core kernels of the indexer: bf16, 64 heads x 128 channels.
#include "kernels/cuda/query_keys.cuh"

namespace moesaic::cuda {

/// Whether scores_tiled() takes these sizes.
bool scores_tiled_takes(const ConstTensorView& qi,
                        const ConstTensorView& ki,
                        const ConstTensorView& w);

/// scores[t - first, s] (f32, [rows, keys]) for the queries [first, first + rows) and the keys of their documents up to
/// their positions. A query that sees at most `more_than` keys may be left out. Other entries keep what they hold.
void scores_tiled(const CudaContext& context,
                  float* scores,
                  const ConstTensorView& qi,
                  const ConstTensorView& ki,
                  const ConstTensorView& w,
                  const QueryKeys& see,
                  std::int64_t first,
                  std::int64_t rows,
                  std::int64_t more_than);

}  // namespace moesaic::cuda
