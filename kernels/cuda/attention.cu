// The choice among the attention kernels.
#include "kernels/cuda/attention_tiled.cuh"

namespace moesaic {

namespace {

// "tiled" walks all keys, a selection masks them: cheaper than gathering the selected ones up to some
// 16,000 tokens.
template <class Op>
void choose(CudaContext& context, const Op& op) {
  if (cuda::attention_is_tiled(context, op)) {
    cuda::report_path(context, op, "tiled");
    cuda::attention_tiled(context, op);
  } else {
    cuda::report_path(context, op, "plain");
    cuda::attention_plain(context, op);
  }
}

}  // namespace

void launch(CudaContext& context, const AttentionForward& op) {
  choose(context, op);
}

void launch(CudaContext& context, const AttentionBackward& op) {
  choose(context, op);
}

}  // namespace moesaic
