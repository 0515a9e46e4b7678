// Small ops on the step's scalars: GuardFinite, MemberScalars.
#include "kernels/cuda/launch.h"
#include "kernels/ops/balance.h"
#include "kernels/ops/guard.h"
#include "kernels/ops/member_scalars.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 256;
constexpr int kManyThreads = 1024;

template <class S, class T>
__global__ void __launch_bounds__(kManyThreads)
    guard_kernel(S* scalars, const T* values, std::int64_t n) {
  bool broken = false;
  for (std::int64_t i = threadIdx.x; i < n; i += kManyThreads)
    broken = broken || !isfinite(values[i]);
  if (__syncthreads_or(broken) == 0 || threadIdx.x != 0) return;
  scalars[index_of(StepScalar::skip)] = S(1);
  scalars[index_of(StepScalar::clip_factor)] = S(0);
}

template <class T, class N>
__global__ void __launch_bounds__(kThreads) member_kernel(
    T* rows, const T* scalars, const N* counts, const std::int32_t* numbers, std::int64_t members) {
  const std::int64_t n = members * kNumStepScalars;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t member = i / kNumStepScalars;
    const auto slot = static_cast<int>(i - member * kNumStepScalars);
    const bool idle = slot == index_of(StepScalar::skip) &&
                      counts[numbers == nullptr ? member : numbers[member]] == 0;
    rows[i] = idle ? T(1) : scalars[slot];
  }
}

template <class F>
void dispatch_stats(DType dtype, F&& f) {
  if (dtype == DType::f64) return f(TypeTag<double>{});
  MOESAIC_CHECK(dtype == DType::f32, std::string("statistics are f64 or f32, not ") + name(dtype));
  f(TypeTag<float>{});
}
template <class F>
void dispatch_int(DType dtype, F&& f) {
  if (dtype == DType::i64) return f(TypeTag<std::int64_t>{});
  MOESAIC_CHECK(dtype == DType::i32, std::string("counts are i64 or i32, not ") + name(dtype));
  f(TypeTag<std::int32_t>{});
}
unsigned element_grid(const CudaContext& context, std::int64_t n) {
  return grid_for(context, (n + kThreads - 1) / kThreads);
}

}  // namespace

void launch(CudaContext& context, const GuardFinite& op) {
  if (is_dry(context) || op.values.numel() == 0) return;
  dispatch_stats(op.scalars.dtype(), [&]<class S>(TypeTag<S>) {
    dispatch_stats(op.values.dtype(), [&]<class T>(TypeTag<T>) {
      guard_kernel<<<1, kManyThreads, 0, native_stream(context)>>>(
          op.scalars.as<S>(), op.values.as<T>(), op.values.numel());
    });
  });
  check_launch("kernel guard_finite");
}

void launch(CudaContext& context, const MemberScalars& op) {
  if (is_dry(context) || op.rows.numel() == 0) return;
  dispatch_stats(op.rows.dtype(), [&]<class T>(TypeTag<T>) {
    dispatch_int(op.counts.dtype(), [&]<class N>(TypeTag<N>) {
      member_kernel<<<element_grid(context, op.rows.numel()),
                      kThreads,
                      0,
                      native_stream(context)>>>(
          op.rows.as<T>(),
          op.scalars.as<T>(),
          op.counts.as<N>(),
          op.numbers.empty() ? nullptr : op.numbers.as<std::int32_t>(),
          op.rows.dim(0));
    });
  });
  check_launch("kernel member_scalars");
}

}  // namespace moesaic
