// One token of the recurrence. Bound by reading and writing the states: a block takes some value columns of one head, its
// threads keep their part of the decayed state in registers between the two uses (rows beyond are read again).
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/ops/kda_chunk.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 256;
constexpr int kKeptRows = 128;  // of a state, in the block's registers

template <class T, class A>
struct StepData {
  T* o;
  A* s_out;
  const T *q, *k, *v;
  const A *g, *beta, *s_in;
  std::int64_t K, V;
};

template <class A, int N>
struct Columns {
  A v[N];
};

/// Sum over the row lanes, for every thread: lanes of a warp first, then the warps in order.
template <int kColumnLanes, class A, int N>
__device__ __forceinline__ Columns<A, N> sum_of_rows(
    Columns<A, N> x, A (&partial)[kThreads / kWarp][kColumnLanes * N]) {
  const int column = static_cast<int>(threadIdx.x) % kColumnLanes,
            warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int offset = kColumnLanes; offset < kWarp; offset *= 2)
      x.v[i] += __shfl_xor_sync(0xffffffffU, x.v[i], offset);
  }
  __syncthreads();  // the sums before
  if (threadIdx.x % kWarp < kColumnLanes) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      partial[warp][column * N + i] = x.v[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) {
    x.v[i] = partial[0][column * N + i];
#pragma unroll
    for (int w = 1; w < kThreads / kWarp; ++w)
      x.v[i] += partial[w][column * N + i];
  }
  return x;
}

// s_out may be s_in: a thread overwrites what it alone reads, after the last reading.
template <class T, class A, int N, int kColumnLanes>
__global__ void __launch_bounds__(kThreads) step_kernel(StepData<T, A> d) {
  constexpr int kRowLanes = kThreads / kColumnLanes, kKept = kKeptRows / kRowLanes;
  __shared__ A partial[kThreads / kWarp][kColumnLanes * N];
  constexpr A kFloor = sizeof(A) == 8 ? A(-708) : A(-87);  // e^g is no normal number below
  const std::int64_t blocks = (d.V + kColumnLanes * N - 1) / (kColumnLanes * N);
  const std::int64_t row = blockIdx.x / blocks;  // sequence and head
  const std::int64_t j = blockIdx.x % blocks * kColumnLanes * N + threadIdx.x % kColumnLanes * N;
  const int first = static_cast<int>(threadIdx.x) / kColumnLanes;
  const bool valid = j < d.V;  // V is a multiple of N
  const A* in = d.s_in + row * d.K * d.V + j;
  A* out = d.s_out + row * d.K * d.V + j;
  const auto decayed = [&](std::int64_t i) {
    const A g = d.g[row * d.K + i], alpha = g < kFloor ? A(0) : exp(g);
    auto s = load<N>(in + i * d.V);
#pragma unroll
    for (int n = 0; n < N; ++n)
      s.v[n] *= alpha;
    return s;
  };
  const auto kept_rows = [&](auto&& f) {
#pragma unroll
    for (int m = 0; m < kKept; ++m) {
      const std::int64_t i = first + m * kRowLanes;
      if (valid && i < d.K) f(m, i);
    }
  };
  const auto other_rows = [&](auto&& f) {
    for (std::int64_t i = first + kKept * kRowLanes; valid && i < d.K; i += kRowLanes)
      f(i);
  };

  Vec<A, N> kept[kKept];
  Columns<A, N> read{};
  const auto add_read = [&](const Vec<A, N>& s, std::int64_t i) {
    const A key = widen<A>(d.k[row * d.K + i]);
#pragma unroll
    for (int n = 0; n < N; ++n)
      read.v[n] += s.v[n] * key;
  };
  kept_rows([&](int m, std::int64_t i) { kept[m] = decayed(i); });
  kept_rows([&](int m, std::int64_t i) { add_read(kept[m], i); });
  other_rows([&](std::int64_t i) { add_read(decayed(i), i); });
  read = sum_of_rows<kColumnLanes>(read, partial);

  Columns<A, N> u{}, o{};
  if (valid) {
#pragma unroll
    for (int n = 0; n < N; ++n)
      u.v[n] = d.beta[row] * (widen<A>(d.v[row * d.V + j + n]) - read.v[n]);
  }
  const auto finish = [&](Vec<A, N> s, std::int64_t i) {
    const A key = widen<A>(d.k[row * d.K + i]), query = widen<A>(d.q[row * d.K + i]);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      s.v[n] += key * u.v[n];
      o.v[n] += s.v[n] * query;
    }
    store<N>(out + i * d.V, s);
  };
  kept_rows([&](int m, std::int64_t i) { finish(kept[m], i); });
  other_rows([&](std::int64_t i) { finish(decayed(i), i); });
  o = sum_of_rows<kColumnLanes>(o, partial);
  if (first != 0 || !valid) return;
#pragma unroll
  for (int n = 0; n < N; ++n)
    d.o[row * d.V + j + n] = round_to<T>(o.v[n]);
}

template <class T>
void step(const CudaContext& context, const KdaStep& op) {
  using A = acc_t<T>;
  using D = device_t<T>;
  const StepData<D, A> data{reinterpret_cast<D*>(op.o.as<T>()),
                            op.s_out.as<A>(),
                            reinterpret_cast<const D*>(op.q.as<T>()),
                            reinterpret_cast<const D*>(op.k.as<T>()),
                            reinterpret_cast<const D*>(op.v.as<T>()),
                            op.g.as<A>(),
                            op.beta.as<A>(),
                            op.s_in.as<A>(),
                            op.q.dim(2),
                            op.v.dim(2)};
  const auto stream = native_stream(context);
  const auto run = [&]<int N, int kColumnLanes>(std::integral_constant<int, N>,
                                                std::integral_constant<int, kColumnLanes>) {
    const std::int64_t width = kColumnLanes * N, blocks = (data.V + width - 1) / width;
    step_kernel<D, A, N, kColumnLanes>
        <<<static_cast<unsigned>(op.q.dim(0) * op.q.dim(1) * blocks), kThreads, 0, stream>>>(data);
    check_launch("kernel kda_step");
  };
  constexpr int kWide = 16 / sizeof(A);
  if (data.V % kWide == 0 && is_aligned(data.s_in, 16) && is_aligned(data.s_out, 16)) {
    if (data.V >= kWarp * kWide)
      return run(std::integral_constant<int, kWide>{}, std::integral_constant<int, kWarp>{});
    run(std::integral_constant<int, kWide>{}, std::integral_constant<int, 8>{});
  } else {
    run(std::integral_constant<int, 1>{}, std::integral_constant<int, kWarp>{});
  }
}

}  // namespace

void launch(CudaContext& context, const KdaStep& op) {
  if (is_dry(context) || op.q.dim(0) == 0) return;
  dispatch_float(op.q.dtype(), [&]<class T>(TypeTag<T>) { step<T>(context, op); });
}

}  // namespace moesaic
