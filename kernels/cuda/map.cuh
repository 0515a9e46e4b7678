#pragma once
// Elementwise kernels: a functor with `template <int N> void at(i)`, which handles elements [i, i + N), runs over n elements
// in accesses of Wide elements, and over what is left (or not aligned) one by one.
#include "kernels/cuda/vectors.cuh"

namespace moesaic::cuda {

constexpr int kMapThreads = 256;

template <int N, class F>
__global__ void __launch_bounds__(kMapThreads)
    map_kernel(F f, std::int64_t begin, std::int64_t end) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kMapThreads * N;
  for (std::int64_t i = begin + (std::int64_t{blockIdx.x} * kMapThreads + threadIdx.x) * N; i < end;
       i += stride)
    f.template at<N>(i);
}

template <int Wide, class F>
void map(const CudaContext& context,
         const char* name,
         std::int64_t n,
         std::initializer_list<const void*> pointers,
         const F& f) {
  const std::int64_t body = all_aligned(pointers) ? n / Wide * Wide : 0;
  const auto stream = native_stream(context);
  const auto blocks = [&](std::int64_t items) {
    return grid_for(context, (items + kMapThreads - 1) / kMapThreads, 16);
  };
  if (body > 0) map_kernel<Wide><<<blocks(body / Wide), kMapThreads, 0, stream>>>(f, 0, body);
  if (n > body) map_kernel<1><<<blocks(n - body), kMapThreads, 0, stream>>>(f, body, n);
  check_launch(name);
}

}  // namespace moesaic::cuda
