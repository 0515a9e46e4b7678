// Gemm through cublasLt.
#include "kernels/ops/gemm.h"

#include "kernels/cuda/blas_product.h"
#include "kernels/cuda/launch.h"

namespace moesaic {
namespace {

cuda::BlasProduct::Matrix matrix_of(const ConstTensorView& v) {
  return {.data = v.data(), .rows = v.dim(0), .cols = v.dim(1)};
}

}  // namespace

void launch(CudaContext& context, const Gemm& op) {
  if (op.c.numel() == 0) return;
  if (op.k() == 0) {
    if (!op.accumulate) zero_tensor(op.c, context.stream);
    return;
  }
  const Arena::Mark mark(context.scratch);
  const TensorView workspace = cuda::take_blas_workspace(context.scratch);
  if (cuda::is_dry(context)) return;
  cuda::multiply(context,
                 {.a = matrix_of(op.a),
                  .b = matrix_of(op.b),
                  .input = op.a.dtype(),
                  .d = op.c.data(),
                  .c = op.accumulate ? op.c.data() : nullptr,
                  .output = op.c.dtype(),
                  .transpose_a = op.transpose_a,
                  .transpose_b = op.transpose_b,
                  .alpha = op.alpha,
                  .beta = op.accumulate ? 1.0 : 0.0},
                 workspace);
}

}  // namespace moesaic
