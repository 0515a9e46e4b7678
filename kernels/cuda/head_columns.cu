// Some channels of every head from one tensor to another, in units of up to 16 bytes.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/ops/head_linear.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 256;

// Distances in units.
template <class Unit>
__global__ void __launch_bounds__(kThreads) copy_kernel(Unit* y,
                                                        const Unit* x,
                                                        std::int64_t rows,
                                                        std::int64_t n,
                                                        std::int64_t y_pitch,
                                                        std::int64_t x_pitch) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < rows * n; i += step)
    y[i / n * y_pitch + i % n] = x[i / n * x_pitch + i % n];
}

template <class Unit>
bool copy(const CudaContext& context, const CopyHeadColumns& op) {
  const auto size = static_cast<std::int64_t>(byte_size(op.x.x.dtype())),
             unit = static_cast<std::int64_t>(sizeof(Unit));
  const std::int64_t bytes = op.n * size, y_pitch = op.y.x.dim(2) * size,
                     x_pitch = op.x.x.dim(2) * size, rows = op.x.x.dim(0) * op.x.x.dim(1);
  auto* y = op.y.x.data() + op.y.begin * size;
  const auto* x = op.x.x.data() + op.x.begin * size;
  if (bytes % unit != 0 || y_pitch % unit != 0 || x_pitch % unit != 0 ||
      !is_aligned(y, sizeof(Unit)) || !is_aligned(x, sizeof(Unit)))
    return false;
  copy_kernel<<<grid_for(context, (rows * (bytes / unit) + kThreads - 1) / kThreads),
                kThreads,
                0,
                native_stream(context)>>>(reinterpret_cast<Unit*>(y),
                                          reinterpret_cast<const Unit*>(x),
                                          rows,
                                          bytes / unit,
                                          y_pitch / unit,
                                          x_pitch / unit);
  check_launch("kernel copy_head_columns");
  return true;
}

}  // namespace

void launch(CudaContext& context, const CopyHeadColumns& op) {
  if (is_dry(context) || op.x.x.dim(0) == 0) return;
  if (copy<uint4>(context, op) || copy<std::uint32_t>(context, op)) return;
  MOESAIC_CHECK(copy<std::uint16_t>(context, op), "columns of single bytes");
}

}  // namespace moesaic
