#pragma once
// Tensor-core kernels of the indexer: bf16, 64 heads x 128 channels.
#include "kernels/cuda/query_keys.cuh"
#include "kernels/ops/indexer.h"

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

/// Whether target_tiled() takes these sizes: keys of 128 channels per head and 64 shared ones.
bool target_tiled_takes(const IndexerLoss& op);

/// target[t - first, s] (f32, [rows, keys]) = sum_h exp(logit_h - lse_h) of the pairs that see each other; other entries
/// keep what they hold.
void target_tiled(const CudaContext& context,
                  float* target,
                  const IndexerLoss& op,
                  const QueryKeys& see,
                  const SelectionWords& selection,
                  std::int64_t first,
                  std::int64_t rows);

/// Whether gradients_tiled() takes these sizes.
bool gradients_tiled_takes(const IndexerLoss& op);
/// Pieces that the queries of one call are cut into, each with its own sum of dki: with packed documents few keys are seen
/// by a call's queries, and the pieces are what fills the device.
std::int64_t gradient_chunks(std::int64_t keys);

/// dqi and dw of the queries [first, first + rows), and their share of dki: parts [gradient_chunks, keys, 128] f32 is
/// written when `fresh`, else added to. `rows_at_a_time` is what all calls but the last one pass as `rows`. d_index [rows, keys] f32 is d loss / d score; it must be 0 where a query sees
/// a key that its selection does not hold.
void gradients_tiled(const CudaContext& context,
                     const IndexerLoss& op,
                     float* parts,
                     const float* d_index,
                     const QueryKeys& see,
                     const SelectionWords& selection,
                     std::int64_t first,
                     std::int64_t rows,
                     std::int64_t rows_at_a_time,
                     bool fresh);

}  // namespace moesaic::cuda
