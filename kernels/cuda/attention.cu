// The choice among the attention kernels.
#include "kernels/cuda/attention_tiled.cuh"

namespace moesaic {

namespace {

// With a selection "tiled" still walks all keys and masks. Keys and values are per head here, so a
// query that gathers its k selected ones shares nothing with its neighbours: it moves 512 + 2 dr bytes
// per key and head, where a tile of 128 queries moves as much per key for all of them. Gathering pays
// in the absorbed form only, which is another op (SparseMlaForward).
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
