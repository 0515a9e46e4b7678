// The choice among the attention kernels.
#include "kernels/cuda/attention_common.cuh"

namespace moesaic {

void launch(CudaContext& context, const AttentionForward& op) {
  cuda::report_path(context, op, "plain");
  cuda::attention_plain(context, op);
}

void launch(CudaContext& context, const AttentionBackward& op) {
  cuda::report_path(context, op, "plain");
  cuda::attention_plain(context, op);
}

}  // namespace moesaic
