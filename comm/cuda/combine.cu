#include <algorithm>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "comm/cuda/combine.h"
#include "memory/cuda/check.h"

namespace moesaic::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMaxBlocks = 1024;

template <class T>
struct Accumulator {
  using type = T;
};
template <>
struct Accumulator<__nv_bfloat16> {
  using type = float;
};

__device__ __forceinline__ float widen(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
template <class T>
__device__ __forceinline__ T widen(T x) {
  return x;
}
template <class T, class A>
__device__ __forceinline__ T narrow(A x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

// max and min keep NaN: a != a.
template <ReduceOp kOp, class A>
__device__ __forceinline__ A combine(A a, A v) {
  if constexpr (kOp == ReduceOp::sum) return a + v;
  if constexpr (kOp == ReduceOp::max) return (a > v || a != a) ? a : v;
  return (a < v || a != a) ? a : v;
}

template <ReduceOp kOp, class T>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(T* out, const T* parts, const T* own, int rank, int size, std::int64_t count) {
  using A = typename Accumulator<T>::type;
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += stride) {
    A acc = widen(rank == 0 ? own[i] : parts[i]);
    for (int p = 1; p < size; ++p)
      acc = combine<kOp>(acc, static_cast<A>(widen(p == rank ? own[i] : parts[p * count + i])));
    out[i] = narrow<T>(acc);
  }
}

template <class T>
void launch(std::byte* out, const RankParts& in, ReduceOp op, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(
      std::clamp<std::int64_t>((in.count + kThreads - 1) / kThreads, 1, kMaxBlocks));
  const auto go = [&](auto kernel) {
    kernel<<<blocks, kThreads, 0, stream>>>(reinterpret_cast<T*>(out),
                                            reinterpret_cast<const T*>(in.parts),
                                            reinterpret_cast<const T*>(in.own),
                                            in.rank,
                                            in.size,
                                            in.count);
  };
  switch (op) {
    case ReduceOp::sum:
      go(combine_kernel<ReduceOp::sum, T>);
      break;
    case ReduceOp::max:
      go(combine_kernel<ReduceOp::max, T>);
      break;
    case ReduceOp::min:
      go(combine_kernel<ReduceOp::min, T>);
      break;
  }
  check_call(static_cast<int>(cudaGetLastError()), "combine_in_order");
}

}  // namespace

void combine_in_order(
    std::byte* out, const RankParts& in, DType dtype, ReduceOp op, cudaStream_t stream) {
  if (in.count == 0) return;
  switch (dtype) {
    case DType::f64:
      return launch<double>(out, in, op, stream);
    case DType::f32:
      return launch<float>(out, in, op, stream);
    case DType::bf16:
      return launch<__nv_bfloat16>(out, in, op, stream);
    case DType::i64:
      return launch<std::int64_t>(out, in, op, stream);
    case DType::i32:
      return launch<std::int32_t>(out, in, op, stream);
    default:
      check_failed(__FILE__, __LINE__, "reducible dtype", name(dtype));
  }
}

}  // namespace moesaic::cuda
