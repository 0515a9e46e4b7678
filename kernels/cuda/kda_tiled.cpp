// No tensor-core kernels for the KDA chunk form yet: every op takes the plain ones.
#include "core/base/error.h"
#include "kernels/cuda/kda_chunk.h"

namespace moesaic::cuda {

bool kda_tiled_takes(const KdaChunkForward& /*op*/) {
  return false;
}
bool kda_tiled_takes(const KdaChunkBackward& /*op*/) {
  return false;
}
void kda_tiled_forward(CudaContext& /*context*/, const KdaChunkForward& /*op*/) {
  MOESAIC_CHECK(false, "kda_tiled_forward without tensor-core kernels");
}
void kda_tiled_backward(CudaContext& /*context*/, const KdaChunkBackward& /*op*/) {
  MOESAIC_CHECK(false, "kda_tiled_backward without tensor-core kernels");
}

}  // namespace moesaic::cuda
