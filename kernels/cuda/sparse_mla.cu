// The choice among the sparse MLA kernels.
#include "kernels/cuda/sparse_mla.cuh"

namespace moesaic {

void launch(CudaContext& context, const SparseMlaForward& op) {
  cuda::report_path(context, op, "plain");
  cuda::sparse_mla_plain(context, op);
}

void launch(CudaContext& context, const SparseMlaBackward& op) {
  cuda::report_path(context, op, "plain");
  cuda::sparse_mla_plain(context, op);
}

}  // namespace moesaic
