// Per-head linear maps as batched products of cublasLt, a head being a matrix whose rows lie as far apart as tokens.
#include "kernels/ops/head_linear.h"

#include "kernels/cuda/blas_product.h"
#include "kernels/cuda/launch.h"

namespace moesaic {
namespace {

cuda::BlasProduct::Matrix heads_of(const ConstTensorView& x, std::int64_t begin, std::int64_t n) {
  const std::int64_t channels = x.dim(2);
  return {.data = x.data() + begin * static_cast<std::int64_t>(byte_size(x.dtype())),
          .rows = x.dim(0),
          .cols = n,
          .stride = channels,
          .pitch = x.dim(1) * channels};
}
cuda::BlasProduct::Matrix blocks_of(const ConstTensorView& w,
                                    std::int64_t heads,
                                    std::int64_t begin,
                                    std::int64_t m) {
  const std::int64_t n = w.dim(1);
  return {.data = w.data() + begin * n * static_cast<std::int64_t>(byte_size(w.dtype())),
          .rows = m,
          .cols = n,
          .stride = w.dim(0) / heads * n};
}

void multiply_heads(CudaContext& context, cuda::BlasProduct product, std::int64_t heads) {
  const Arena::Mark mark(context.scratch);
  const TensorView workspace = cuda::take_blas_workspace(context.scratch);
  if (cuda::is_dry(context)) return;
  product.batch = product.nominal_batch = heads;
  cuda::multiply(context, product, workspace);
}

}  // namespace

void launch(CudaContext& context, const HeadLinear& op) {
  if (op.x.x.dim(0) == 0) return;
  const auto y = heads_of(op.y.x, op.y.begin, op.to());
  multiply_heads(context,
                 {.a = heads_of(op.x.x, op.x.begin, op.from()),
                  .b = blocks_of(op.w, op.x.x.dim(1), op.row_begin, op.m),
                  .input = op.x.x.dtype(),
                  .d = const_cast<void*>(y.data),
                  .d_stride = y.stride,
                  .d_pitch = y.pitch,
                  .output = op.y.x.dtype(),
                  .transpose_b = op.transpose_w},
                 op.x.x.dim(1));
}

void launch(CudaContext& context, const HeadLinearBackwardWeight& op) {
  if (op.a.x.dim(0) == 0) return;
  const auto dw = blocks_of(op.dw, op.a.x.dim(1), op.row_begin, op.m);
  multiply_heads(context,
                 {.a = heads_of(op.a.x, op.a.begin, op.m),
                  .b = heads_of(op.b.x, op.b.begin, op.dw.dim(1)),
                  .input = op.a.x.dtype(),
                  .d = const_cast<void*>(dw.data),
                  .c = dw.data,
                  .d_stride = dw.stride,
                  .output = op.dw.dtype(),
                  .transpose_a = true,
                  .beta = 1.0},
                 op.a.x.dim(1));
}

}  // namespace moesaic
