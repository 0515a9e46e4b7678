// Compiled without fused multiply-adds (CMakeLists.txt), as core/base/random_math.h wants it.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/split_master.cuh"
#include "kernels/initial_value.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 256;

__device__ __forceinline__ void put(double* y, std::int64_t i, double value) {
  y[i] = value;
}
__device__ __forceinline__ void put(float* y, std::int64_t i, double value) {
  y[i] = static_cast<float>(value);
}
__device__ __forceinline__ void put(__nv_bfloat16* y, std::int64_t i, double value) {
  y[i] = __float2bfloat16_rn(static_cast<float>(value));
}

template <class Y, class C>
__global__ void __launch_bounds__(kThreads) draw_kernel(Y* __restrict__ y,
                                                        C* __restrict__ copy,
                                                        std::int64_t n,
                                                        InitialKind kind,
                                                        double a,
                                                        double b,
                                                        std::uint64_t key,
                                                        InitialValues::Index index) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += stride) {
    const double value = random_math::initial_value(
        kind, a, b, key, random_math::whole_index(index, static_cast<std::uint64_t>(i)));
    put(y, i, value);
    if (copy != nullptr) put(copy, i, value);
  }
}

__global__ void __launch_bounds__(kThreads) draw_split_kernel(__nv_bfloat16* __restrict__ y,
                                                              std::uint16_t* __restrict__ remainder,
                                                              std::int64_t n,
                                                              InitialKind kind,
                                                              double a,
                                                              double b,
                                                              std::uint64_t key,
                                                              InitialValues::Index index) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += stride) {
    const double value = random_math::initial_value(
        kind, a, b, key, random_math::whole_index(index, static_cast<std::uint64_t>(i)));
    split_master(static_cast<float>(value), y[i], remainder[i]);
  }
}

}  // namespace

void launch(CudaContext& context, const InitialValues& op) {
  const std::int64_t n = op.y.numel();
  if (is_dry(context) || n == 0) return;
  const auto stream = native_stream(context);
  const unsigned blocks = grid_for(context, (n + kThreads - 1) / kThreads);
  if (!op.remainder.empty()) {
    draw_split_kernel<<<blocks, kThreads, 0, stream>>>(
        reinterpret_cast<__nv_bfloat16*>(op.y.as<bf16>()),
        op.remainder.as<std::uint16_t>(),
        n,
        op.kind,
        op.a,
        op.b,
        op.key,
        op.index());
    return check_launch("initial_values");
  }
  dispatch_float(op.y.dtype(), [&]<class Y>(TypeTag<Y>) {
    const DType other = op.copy.empty() ? op.y.dtype() : op.copy.dtype();
    dispatch_float(other, [&]<class C>(TypeTag<C>) {
      draw_kernel<<<blocks, kThreads, 0, stream>>>(
          reinterpret_cast<device_t<Y>*>(op.y.as<Y>()),
          op.copy.empty() ? nullptr : reinterpret_cast<device_t<C>*>(op.copy.as<C>()),
          n,
          op.kind,
          op.a,
          op.b,
          op.key,
          op.index());
    });
  });
  check_launch("initial_values");
}

}  // namespace moesaic
