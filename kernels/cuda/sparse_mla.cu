// The choice among the sparse MLA kernels.
#include "kernels/cuda/sparse_mla_tiled.cuh"

namespace moesaic {

namespace {

template <class Op>
void choose(CudaContext& context, const Op& op) {
  if (cuda::sparse_mla_is_tiled(context, op)) {
    cuda::report_path(context, op, "tiled");
    cuda::sparse_mla_tiled(context, op);
  } else {
    cuda::report_path(context, op, "plain");
    cuda::sparse_mla_plain(context, op);
  }
}

}  // namespace

void launch(CudaContext& context, const SparseMlaForward& op) {
  choose(context, op);
}

void launch(CudaContext& context, const SparseMlaBackward& op) {
  choose(context, op);
}

}  // namespace moesaic
