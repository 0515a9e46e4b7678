// Around the sparse MLA kernels: the largest logits, and how contributions to the keys' gradients are bounded, counted
// and turned into numbers again.
#include <limits>

#include "kernels/cuda/sparse_mla.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kUnitThreads = 1024;

unsigned blocks_of(std::int64_t n, std::int64_t per_block) {
  return static_cast<unsigned>((n + per_block - 1) / per_block);
}

template <class A>
__device__ __forceinline__ A warp_max(A x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    x = max(x, __shfl_xor_sync(0xffffffffU, x, offset));
  return x;
}

// One block per head.
template <class A>
__global__ void __launch_bounds__(kThreads)
    row_maxima_kernel(A* max_logit, const A* maxima, std::int64_t rows, bool accumulate) {
  __shared__ A in_warp[kWarps];
  A largest = -INFINITY;
  for (std::int64_t t = threadIdx.x; t < rows; t += kThreads)
    largest = max(largest, maxima[blockIdx.x * rows + t]);
  largest = warp_max(largest);
  if (threadIdx.x % kWarp == 0) in_warp[threadIdx.x / kWarp] = largest;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (const A other : in_warp)
    largest = max(largest, other);
  max_logit[blockIdx.x] = accumulate ? max(max_logit[blockIdx.x], largest) : largest;
}

// One warp per key.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) norm_kernel(
    KeySumState* state, const T* kv, std::int64_t keys, std::int64_t width, std::int64_t dc) {
  const std::int64_t s = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (s >= keys) return;
  double squares = 0;  // whose range holds the square of any float
  for (std::int64_t c = threadIdx.x % kWarp * N; c < dc; c += kWarp * N) {
    const auto x = load<N>(kv + s * width + c);
#pragma unroll
    for (int e = 0; e < N; ++e)
      squares += widen<double>(x.v[e]) * widen<double>(x.v[e]);
  }
  squares = warp_sum(squares);
  // Of numbers that are not negative, and NaN, the bits are ordered as the numbers.
  if (threadIdx.x % kWarp == 0)
    atomicMax(&state->largest_norm, __float_as_uint(fabsf(static_cast<float>(sqrt(squares)))));
}

template <class A, class T>
struct BoundArgs {
  A *bounds, *delta, *log_sum;
  const KeySumState* state;
  const T *q, *d_o, *o;
  const A* lse;
  std::int64_t rows, heads, width, dc;
  A scale, log_sum_factor;
};

template <class A>
__device__ __forceinline__ A largest_of(A seen, A x) {
  return x <= seen ? seen : x;  // keeps NaN
}
template <class A>
__device__ __forceinline__ A warp_largest(A x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const A other = __shfl_xor_sync(0xffffffffU, x, offset);
    x = isnan(x) ? x : largest_of(x, other);
  }
  return x;
}

// One block per query, one warp per head.
template <class A, class T, int N>
__global__ void __launch_bounds__(kThreads) bounds_kernel(BoundArgs<A, T> a) {
  __shared__ A in_warp[kWarps];
  const std::int64_t t = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x) % kWarp,
            warp = static_cast<int>(threadIdx.x) / kWarp;
  const A largest_key = static_cast<A>(__uint_as_float(a.state->largest_norm));
  A bound = 0;
  for (std::int64_t h = warp; h < a.heads; h += kWarps) {
    const std::int64_t at = t * a.heads + h;
    A largest_q = 0, largest_d = 0, delta = 0;
    double squares = 0;
    for (std::int64_t c = lane * N; c < a.width; c += kWarp * N) {
      const auto q = load<N>(a.q + at * a.width + c);
#pragma unroll
      for (int e = 0; e < N; ++e)
        largest_q = isnan(largest_q) ? largest_q : largest_of(largest_q, abs(widen<A>(q.v[e])));
    }
    for (std::int64_t c = lane * N; c < a.dc; c += kWarp * N) {
      const auto d = load<N>(a.d_o + at * a.dc + c);
      const auto o = load<N>(a.o + at * a.dc + c);
#pragma unroll
      for (int e = 0; e < N; ++e) {
        const A x = widen<A>(d.v[e]);
        largest_d = max(largest_d, abs(x));
        squares += static_cast<double>(x) * static_cast<double>(x);
        delta += x * widen<A>(o.v[e]);
      }
    }
    largest_q = warp_largest(largest_q);
    largest_d = warp_max(largest_d);
    squares = warp_sum(squares);  // NaN, if a d_o is
    delta = warp_sum(delta);
    const A lse = a.lse[h * a.rows + t];
    const bool none = lse == -INFINITY;
    if (!none)
      bound += a.scale * largest_q * (static_cast<A>(sqrt(squares)) * largest_key + abs(delta)) +
               largest_d + (isfinite(lse) ? A(0) : A(NAN));
    if (lane == 0) {
      a.delta[h * a.rows + t] = delta;
      a.log_sum[h * a.rows + t] = none ? A(INFINITY) : lse * a.log_sum_factor;
    }
  }
  if (lane == 0) in_warp[warp] = bound;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kWarps; ++i)
    bound += in_warp[i];
  a.bounds[t] = bound;
}

// One block: the exponent e with 2 sum of bounds <= 2^(62 - e).
template <class A>
__global__ void __launch_bounds__(kUnitThreads)
    unit_kernel(KeySumState* state, const A* bounds, std::int64_t rows, int largest_exponent) {
  double sum = 0;
  for (std::int64_t t = threadIdx.x; t < rows; t += kUnitThreads)
    sum += static_cast<double>(bounds[t]);
  sum = row_sum<kUnitThreads>(sum);
  if (threadIdx.x != 0) return;
  state->overflow = isfinite(sum) ? 0 : 1;
  int power = 0;
  if (isfinite(sum) && sum > 0) frexp(2 * sum, &power);
  state->exponent = min(62 - power, largest_exponent);
}

template <class A, class T>
__global__ void __launch_bounds__(kThreads) finish_kernel(
    T* dkv, const void* sums, const KeySumState* state, bool integer, std::int64_t n) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n) return;
  A x = integer ? static_cast<A>(ldexp(static_cast<double>(static_cast<const long long*>(sums)[i]),
                                       -state->exponent))
                : static_cast<const A*>(sums)[i];
  if (state->overflow != 0) x = NAN;
  dkv[i] = round_to<T>(x);
}

template <class T>
void prepare(cudaStream_t stream,
             const KeySumsMemory& memory,
             const SparseMlaBackward& op,
             double log_sum_factor) {
  using A = acc_t<T>;
  using D = device_t<T>;
  constexpr int kVector = sizeof(T) == 2 ? 4 : 1;  // more at a time would not fit registers
  const SparseMlaSizes size = sparse_mla_sizes(op);
  const auto* q = reinterpret_cast<const D*>(op.q.as<T>());
  const auto* kv = reinterpret_cast<const D*>(op.kv.as<T>());
  const auto* d_o = reinterpret_cast<const D*>(op.d_o.as<T>());
  const auto* o = reinterpret_cast<const D*>(op.o.as<T>());
  const bool vectors = size.width % kVector == 0 && size.dc % kVector == 0 && is_aligned(q, 16) &&
                       is_aligned(kv, 16) && is_aligned(d_o, 16) && is_aligned(o, 16);
  auto* state = reinterpret_cast<KeySumState*>(memory.state.data());
  check_call(static_cast<int>(cudaMemsetAsync(state, 0, sizeof(KeySumState), stream)),
             "cudaMemsetAsync");
  check_call(static_cast<int>(cudaMemsetAsync(memory.sums.data(), 0, memory.sums.bytes(), stream)),
             "cudaMemsetAsync");
  if (size.queries == 0) return;
  const auto norms = vectors ? norm_kernel<D, kVector> : norm_kernel<D, 1>;
  norms<<<blocks_of(size.keys, kWarps), kThreads, 0, stream>>>(
      state, kv, size.keys, size.width, size.dc);
  check_launch("kernel sparse_mla_backward: norms of keys");
  const BoundArgs<A, D> args{memory.bounds.as<A>(),
                             memory.delta.as<A>(),
                             memory.log_sum.as<A>(),
                             state,
                             q,
                             d_o,
                             o,
                             op.lse.as<A>(),
                             size.queries,
                             size.heads,
                             size.width,
                             size.dc,
                             static_cast<A>(std::abs(op.scale)),
                             static_cast<A>(log_sum_factor)};
  const auto bounds = vectors ? bounds_kernel<A, D, kVector> : bounds_kernel<A, D, 1>;
  bounds<<<static_cast<unsigned>(size.queries), kThreads, 0, stream>>>(args);
  check_launch("kernel sparse_mla_backward: bounds");
  // 2^exponent is the product of two floats, or a double.
  unit_kernel<<<1, kUnitThreads, 0, stream>>>(
      state, memory.bounds.as<A>(), size.queries, std::is_same_v<A, float> ? 240 : 1000);
  check_launch("kernel sparse_mla_backward: unit of sums");
}

}  // namespace

void combine_row_maxima(cudaStream_t stream,
                        TensorView max_logit,
                        ConstTensorView maxima,
                        bool accumulate) {
  if (max_logit.empty() || max_logit.numel() == 0) return;
  const auto heads = static_cast<unsigned>(maxima.dim(0));
  if (maxima.dtype() == DType::f64) {
    row_maxima_kernel<<<heads, kThreads, 0, stream>>>(
        max_logit.as<double>(), maxima.as<double>(), maxima.dim(1), accumulate);
  } else {
    row_maxima_kernel<<<heads, kThreads, 0, stream>>>(
        max_logit.as<float>(), maxima.as<float>(), maxima.dim(1), accumulate);
  }
  check_launch("kernel sparse_mla_forward: largest logits");
}

KeySumsMemory KeySumsMemory::take(Arena& scratch, const SparseMlaBackward& op) {
  const SparseMlaSizes size = sparse_mla_sizes(op);
  const DType stats = op.lse.dtype();
  KeySumsMemory m;
  m.state = scratch.take({sizeof(KeySumState) / sizeof(std::int32_t)}, DType::i32, "key sums");
  m.bounds = scratch.take({size.queries}, stats, "key sums: bounds");
  m.delta = scratch.take({size.heads, size.queries}, stats, "sparse mla delta");
  m.log_sum = scratch.take({size.heads, size.queries}, stats, "sparse mla log sums");
  m.sums = scratch.take(
      {size.keys, size.width}, op.key_sums == KeySums::integer ? DType::i64 : stats, "key sums");
  return m;
}

void prepare_key_sums(cudaStream_t stream,
                      const KeySumsMemory& memory,
                      const SparseMlaBackward& op,
                      double log_sum_factor) {
  dispatch_float(op.q.dtype(),
                 [&]<class T>(TypeTag<T>) { prepare<T>(stream, memory, op, log_sum_factor); });
}

void finish_key_sums(cudaStream_t stream,
                     const KeySumsMemory& memory,
                     const SparseMlaBackward& op) {
  const std::int64_t n = op.dkv.numel();
  if (n == 0) return;
  dispatch_float(op.q.dtype(), [&]<class T>(TypeTag<T>) {
    finish_kernel<acc_t<T>, device_t<T>><<<blocks_of(n, kThreads), kThreads, 0, stream>>>(
        reinterpret_cast<device_t<T>*>(op.dkv.as<T>()),
        memory.sums.data(),
        reinterpret_cast<const KeySumState*>(memory.state.data()),
        op.key_sums == KeySums::integer,
        n);
  });
  check_launch("kernel sparse_mla_backward: key gradients");
}

}  // namespace moesaic::cuda
