// State maps of a document's piece by the recurrence: a warp owns a column of the state, in shared memory, and walks over
// the tokens. Bound by latency; for the long pieces of large models a form by chunks would be faster.
#include <algorithm>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/ops/kda_segment.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kWarps = 4, kThreads = kWarps * kWarp;

template <class A>
__device__ __forceinline__ A decay(A g) {
  constexpr A kFloor = sizeof(A) == 8 ? A(-708) : A(-87);  // e^g is no normal number below
  return g < kFloor ? A(0) : exp(g);
}

template <class T, class A>
struct SegmentData {
  const T *q, *k, *v;  // v: the values, or d_o
  const A *g, *beta;
  const std::int32_t* cu;
  std::int64_t documents, heads, K, V;
};

// Columns [0, K) are M's, the others E's. grid (column blocks, heads)
template <class T, class A>
__global__ void __launch_bounds__(kThreads) map_kernel(SegmentData<T, A> d, A* m, A* e) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int warp = static_cast<int>(threadIdx.x) / kWarp,
            lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t column = std::int64_t{blockIdx.x} * kWarps + warp, h = blockIdx.y;
  if (column >= d.K + d.V) return;
  A* s = reinterpret_cast<A*>(memory) + warp * d.K;
  const bool of_m = column < d.K;
  const std::int64_t j = of_m ? column : column - d.K;
  for (std::int64_t c = lane; c < d.K; c += kWarp)
    s[c] = of_m && c == j ? A(1) : A(0);
  for (std::int64_t t = d.cu[d.documents - 1]; t < d.cu[d.documents]; ++t) {
    const std::int64_t row = t * d.heads + h;
    A read = 0;
    for (std::int64_t c = lane; c < d.K; c += kWarp) {
      s[c] *= decay(d.g[row * d.K + c]);
      read += widen<A>(d.k[row * d.K + c]) * s[c];
    }
    read = warp_sum(read);
    const A value = of_m ? A(0) : widen<A>(d.v[row * d.V + j]);
    const A u = d.beta[row] * (value - read);
    for (std::int64_t c = lane; c < d.K; c += kWarp)
      s[c] += widen<A>(d.k[row * d.K + c]) * u;
  }
  A* out = of_m ? m + h * d.K * d.K + j : e + h * d.K * d.V + j;
  const std::int64_t stride = of_m ? d.K : d.V;
  for (std::int64_t c = lane; c < d.K; c += kWarp)
    out[c * stride] = s[c];
}

// grid (column blocks, heads); the first document's tokens, last one first.
template <class T, class A>
__global__ void __launch_bounds__(kThreads) gradient_kernel(SegmentData<T, A> d, A* f) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int warp = static_cast<int>(threadIdx.x) / kWarp,
            lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t j = std::int64_t{blockIdx.x} * kWarps + warp, h = blockIdx.y;
  if (j >= d.V) return;
  A* ds = reinterpret_cast<A*>(memory) + warp * d.K;
  for (std::int64_t c = lane; c < d.K; c += kWarp)
    ds[c] = A(0);
  for (std::int64_t t = std::int64_t{d.cu[1]} - 1; t >= d.cu[0]; --t) {
    const std::int64_t row = t * d.heads + h;
    const A d_o = widen<A>(d.v[row * d.V + j]);
    A du = 0;
    for (std::int64_t c = lane; c < d.K; c += kWarp) {
      ds[c] += widen<A>(d.q[row * d.K + c]) * d_o;
      du += widen<A>(d.k[row * d.K + c]) * ds[c];
    }
    du = -d.beta[row] * warp_sum(du);
    for (std::int64_t c = lane; c < d.K; c += kWarp)
      ds[c] = (ds[c] + widen<A>(d.k[row * d.K + c]) * du) * decay(d.g[row * d.K + c]);
  }
  for (std::int64_t c = lane; c < d.K; c += kWarp)
    f[(h * d.K + c) * d.V + j] = ds[c];
}

// One piece: out = M in + E or M^T in + E. grid (blocks of V columns, K, heads): a thread per element.
template <class A>
__global__ void __launch_bounds__(kWarp) advance_kernel(
    A* out, const A* m, const A* in, const A* e, std::int64_t K, std::int64_t V, bool transposed) {
  const std::int64_t j = std::int64_t{blockIdx.x} * kWarp + threadIdx.x, c = blockIdx.y,
                     h = blockIdx.z;
  if (j >= V) return;
  const A* matrix = m + h * K * K;
  A sum = 0;
  for (std::int64_t i = 0; i < K; ++i)
    sum += (transposed ? matrix[i * K + c] : matrix[c * K + i]) * in[(h * K + i) * V + j];
  out[(h * K + c) * V + j] = sum + e[(h * K + c) * V + j];
}

template <class T, class Op>
SegmentData<device_t<T>, acc_t<T>> data_of(const Op& op, ConstTensorView q, ConstTensorView v) {
  using A = acc_t<T>;
  using D = device_t<T>;
  return {reinterpret_cast<const D*>(q.as<T>()),
          reinterpret_cast<const D*>(op.k.template as<T>()),
          reinterpret_cast<const D*>(v.as<T>()),
          op.g.template as<A>(),
          op.beta.template as<A>(),
          op.cu_seqlens.template as<std::int32_t>(),
          op.cu_seqlens.dim(0) - 1,
          op.k.dim(1),
          op.k.dim(2),
          v.dim(2)};
}

unsigned column_blocks(std::int64_t columns) {
  return static_cast<unsigned>((columns + kWarps - 1) / kWarps);
}

template <class Kernel>
unsigned shared_bytes(Kernel* kernel, std::int64_t K, std::size_t element) {
  const std::size_t bytes = static_cast<std::size_t>(kWarps * K) * element;
  if (bytes > 48 * 1024)
    check_call(static_cast<int>(cudaFuncSetAttribute(
                   kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes))),
               "cudaFuncSetAttribute");
  return static_cast<unsigned>(bytes);
}

template <class A>
void chain(const CudaContext& context, const KdaSegmentChain& op, TensorView other) {
  const std::int64_t pieces = op.e.dim(0), heads = op.e.dim(1), K = op.e.dim(2), V = op.e.dim(3),
                     of_m = heads * K * K, of_e = heads * K * V;
  const auto stream = native_stream(context);
  const auto piece = [&](std::int64_t i) { return op.reversed ? pieces - 1 - i : i; };
  // The last of the steps writes `state`, the others take turns.
  const auto memory = [&](std::int64_t i) {
    return (pieces - 1 - i) % 2 == 0 ? op.state.as<A>() : other.as<A>();
  };
  check_call(static_cast<int>(cudaMemcpyAsync(memory(0),
                                              op.e.as<A>() + piece(0) * of_e,
                                              static_cast<std::size_t>(of_e) * sizeof(A),
                                              cudaMemcpyDeviceToDevice,
                                              stream)),
             "cudaMemcpyAsync");
  const dim3 grid(static_cast<unsigned>((V + kWarp - 1) / kWarp),
                  static_cast<unsigned>(K),
                  static_cast<unsigned>(heads));
  for (std::int64_t i = 1; i < pieces; ++i) {
    advance_kernel<A><<<grid, kWarp, 0, stream>>>(memory(i),
                                                  op.m.as<A>() + piece(i) * of_m,
                                                  memory(i - 1),
                                                  op.e.as<A>() + piece(i) * of_e,
                                                  K,
                                                  V,
                                                  op.reversed);
    check_launch("kernel kda_segment_chain");
  }
}

}  // namespace

void launch(CudaContext& context, const KdaSegmentMap& op) {
  if (is_dry(context)) return;
  dispatch_float(op.k.dtype(), [&]<class T>(TypeTag<T>) {
    using A = acc_t<T>;
    const auto data = data_of<T>(op, op.k, op.v);
    const dim3 grid(column_blocks(data.K + data.V), static_cast<unsigned>(data.heads));
    const auto stream = native_stream(context);
    map_kernel<device_t<T>, A>
        <<<grid, kThreads, shared_bytes(map_kernel<device_t<T>, A>, data.K, sizeof(A)), stream>>>(
            data, op.m.as<A>(), op.e.as<A>());
    check_launch("kernel kda_segment_map");
  });
}

void launch(CudaContext& context, const KdaSegmentGradient& op) {
  if (is_dry(context)) return;
  dispatch_float(op.k.dtype(), [&]<class T>(TypeTag<T>) {
    using A = acc_t<T>;
    const auto data = data_of<T>(op, op.q, op.d_o);
    const dim3 grid(column_blocks(data.V), static_cast<unsigned>(data.heads));
    const auto stream = native_stream(context);
    gradient_kernel<device_t<T>, A>
        <<<grid,
           kThreads,
           shared_bytes(gradient_kernel<device_t<T>, A>, data.K, sizeof(A)),
           stream>>>(data, op.f.as<A>());
    check_launch("kernel kda_segment_gradient");
  });
}

void launch(CudaContext& context, const KdaSegmentChain& op) {
  const Arena::Mark mark(context.scratch);
  const TensorView other =
      context.scratch.take(op.state.shape(), op.state.dtype(), "kda_segment.chain");
  if (is_dry(context)) return;
  op.state.dtype() == DType::f64 ? chain<double>(context, op, other)
                                 : chain<float>(context, op, other);
}

}  // namespace moesaic
