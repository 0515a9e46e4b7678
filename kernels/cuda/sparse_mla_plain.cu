// Sparse MLA for any sizes and dtypes: a block per (query, head), its probabilities in scratch memory.
#include "kernels/cuda/attention_common.cuh"
#include "kernels/cuda/query_keys.cuh"
#include "kernels/cuda/sparse_mla.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kKeysPerBlock = 32;  // of the keys' gradients
constexpr std::int64_t kPairBytes = std::int64_t{128} << 20;

template <class A, class T>
struct Args {
  SparseMlaSizes size;
  QueryKeys see;
  const std::int32_t* selected;
  const T *q, *kv;
  A* pairs;  // [rows at once, H, k]: logits, then probabilities
  A* gradients;
  A scale;
  std::int64_t first;  // row of the block with index 0

  // Key i of query t, or -1.
  __device__ std::int64_t key(std::int64_t t, std::int64_t i) const {
    const std::int64_t s = selected[t * size.k + i];
    return s >= see.begins[t] && s <= see.position(t) ? s : -1;
  }
};

// Rows that are worked on at a time.
template <class A>
std::int64_t rows_at_once(const SparseMlaSizes& size) {
  const std::int64_t row = std::max<std::int64_t>(1, size.heads * size.k) * sizeof(A);
  return std::clamp<std::int64_t>(kPairBytes / row, 1, std::max<std::int64_t>(1, size.queries));
}

// out[i] = factor <row, kv(s_i)[:n]>, `hidden` where there is no key. `row` in shared memory.
template <class A, class T>
__device__ void dots(
    A* out, const A* row, std::int64_t n, A hidden, const Args<A, T>& a, std::int64_t t) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (std::int64_t i = threadIdx.x / kWarp; i < a.size.k; i += kWarps) {
    const std::int64_t s = a.key(t, i);
    A sum = 0;
    for (std::int64_t c = lane; s >= 0 && c < n; c += kWarp)
      sum += row[c] * widen<A>(a.kv[s * a.size.width + c]);
    sum = warp_sum(sum);
    if (lane == 0) out[i] = s >= 0 ? sum : hidden;
  }
}

// Column c of sum_i weights[i] kv(s_i).
template <class A, class T>
__device__ A weighted(const A* weights, const Args<A, T>& a, std::int64_t t, std::int64_t c) {
  A sum = 0;
  for (std::int64_t i = 0; i < a.size.k; ++i) {
    const std::int64_t s = a.key(t, i);
    if (s >= 0) sum += weights[i] * widen<A>(a.kv[s * a.size.width + c]);
  }
  return sum;
}

template <class A>
__device__ A block_max(A x) {
  __shared__ A in_warp[kWarps];
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    x = max(x, __shfl_xor_sync(0xffffffffU, x, offset));
  if (threadIdx.x % kWarp == 0) in_warp[threadIdx.x / kWarp] = x;
  __syncthreads();
  for (const A other : in_warp)
    x = max(x, other);
  return x;
}

template <class A>
__device__ A* shared_row() {
  extern __shared__ double memory[];
  return reinterpret_cast<A*>(memory);
}
template <class A, class T>
__device__ void load_row(A* to, const T* from, std::int64_t n, A factor) {
  for (std::int64_t c = threadIdx.x; c < n; c += kThreads)
    to[c] = factor * widen<A>(from[c]);
}

// grid (rows at once, heads)
template <class A, class T>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const Args<A, T> a, T* o, A* lse, A* maxima) {
  const std::int64_t t = a.first + blockIdx.x, h = blockIdx.y, heads = a.size.heads;
  A* const p = a.pairs + (blockIdx.x * heads + h) * a.size.k;
  A* const q = shared_row<A>();
  load_row(q, a.q + (t * heads + h) * a.size.width, a.size.width, a.scale);
  __syncthreads();
  dots(p, q, a.size.width, A(-INFINITY), a, t);
  __syncthreads();
  A largest = -INFINITY;
  for (std::int64_t i = threadIdx.x; i < a.size.k; i += kThreads)
    largest = max(largest, p[i]);
  largest = block_max(largest);
  const A base = largest == -INFINITY ? A(0) : largest;
  A total = 0;
  for (std::int64_t i = threadIdx.x; i < a.size.k; i += kThreads) {
    p[i] = exp(p[i] - base);
    total += p[i];
  }
  total = row_sum<kThreads>(total);  // synchronises
  const A inverse = total == A(0) ? A(0) : A(1) / total;
  for (std::int64_t c = threadIdx.x; c < a.size.dc; c += kThreads)
    o[(t * heads + h) * a.size.dc + c] = round_to<T>(weighted(p, a, t, c) * inverse);
  if (threadIdx.x != 0) return;
  lse[h * a.size.queries + t] = total == A(0) ? A(-INFINITY) : largest + log(total);
  maxima[h * a.size.queries + t] = largest;
}

template <class A, class T>
struct BackwardArgs {
  const T* d_o;
  const A *delta, *log_sum;
  T* dq;
  KeySumsView<A> sums;
};

// grid (rows at once, heads): probabilities, their gradients, dq.
template <class A, class T>
__global__ void __launch_bounds__(kThreads)
    query_kernel(const Args<A, T> a, const BackwardArgs<A, T> b) {
  const std::int64_t t = a.first + blockIdx.x, h = blockIdx.y, heads = a.size.heads,
                     width = a.size.width, dc = a.size.dc, at = t * heads + h;
  A* const p = a.pairs + (blockIdx.x * heads + h) * a.size.k;
  A* const ds = a.gradients + (blockIdx.x * heads + h) * a.size.k;
  A* const row = shared_row<A>();
  load_row(row, a.q + at * width, width, a.scale);
  __syncthreads();
  dots(p, row, width, A(-INFINITY), a, t);
  __syncthreads();
  load_row(row, b.d_o + at * dc, dc, A(1));
  __syncthreads();
  dots(ds, row, dc, A(0), a, t);
  __syncthreads();
  const A log_sum = b.log_sum[h * a.size.queries + t], delta = b.delta[h * a.size.queries + t];
  for (std::int64_t i = threadIdx.x; i < a.size.k; i += kThreads) {
    p[i] = exp(p[i] - log_sum);
    ds[i] = p[i] == A(0) ? A(0) : p[i] * (ds[i] - delta);
  }
  __syncthreads();
  for (std::int64_t c = threadIdx.x; c < width; c += kThreads)
    b.dq[at * width + c] = round_to<T>(weighted(ds, a, t, c) * a.scale);
}

// grid (rows at once, blocks of keys): heads in order, then to the sums.
template <class A, class T>
__global__ void __launch_bounds__(kThreads)
    key_kernel(const Args<A, T> a, const BackwardArgs<A, T> b) {
  const std::int64_t t = a.first + blockIdx.x, heads = a.size.heads, width = a.size.width,
                     dc = a.size.dc, begin = std::int64_t{blockIdx.y} * kKeysPerBlock;
  const KeySumScale scale(b.sums.state->exponent);
  const A limit = 2 * b.sums.bounds[t];
  const A *const p = a.pairs + blockIdx.x * heads * a.size.k, *const ds =
                                                                  a.gradients +
                                                                  blockIdx.x * heads * a.size.k;
  for (std::int64_t i = begin; i < min(a.size.k, begin + kKeysPerBlock); ++i) {
    const std::int64_t s = a.key(t, i);
    if (s < 0) continue;
    for (std::int64_t c = threadIdx.x; c < width; c += kThreads) {
      A x = 0;
      for (std::int64_t h = 0; h < heads; ++h) {
        const std::int64_t at = t * heads + h;
        x += a.scale * ds[h * a.size.k + i] * widen<A>(a.q[at * width + c]);
        if (c < dc) x += p[h * a.size.k + i] * widen<A>(b.d_o[at * dc + c]);
      }
      if (!(abs(x) <= limit)) b.sums.flag();
      if (b.sums.integer) {
        add_units(b.sums.sums, s * width + c, scale.units(x));
      } else {
        atomicAdd(static_cast<A*>(b.sums.sums) + s * width + c, x);
      }
    }
  }
}

// Scratch and the arguments that both directions have.
template <class T>
struct PlainScratch {
  using A = acc_t<T>;
  SparseMlaSizes size;
  std::int64_t rows;
  TensorView begins, pairs, gradients;
  template <class Op>
  PlainScratch(Arena& scratch, const Op& op, bool backward)
      : size(sparse_mla_sizes(op)), rows(rows_at_once<A>(size)) {
    begins = scratch.take({size.queries}, DType::i32, "document begins");
    const Shape shape{rows, size.heads, size.k};
    pairs = scratch.take(shape, dtype_of<A>, "sparse mla probabilities");
    if (backward) gradients = scratch.take(shape, dtype_of<A>, "sparse mla ds");
  }
  template <class Op>
  Args<A, device_t<T>> args(const CudaContext& context, const Op& op) const {
    launch_document_begins(context, begins, op.cu_seqlens, size.keys);
    return {size,
            {size.queries, size.keys, begins.as<std::int32_t>()},
            op.selected.template as<std::int32_t>(),
            reinterpret_cast<const device_t<T>*>(op.q.template as<T>()),
            reinterpret_cast<const device_t<T>*>(op.kv.template as<T>()),
            pairs.as<A>(),
            gradients.empty() ? nullptr : gradients.as<A>(),
            static_cast<A>(op.scale),
            0};
  }
  std::size_t shared_bytes() const { return static_cast<std::size_t>(size.width) * sizeof(A); }
  bool nothing() const { return size.queries == 0 || size.heads == 0; }
};

template <class T>
void forward(CudaContext& context, const SparseMlaForward& op) {
  using A = acc_t<T>;
  using D = device_t<T>;
  const Arena::Mark mark(context.scratch);
  const PlainScratch<T> scratch(context.scratch, op, false);
  const SparseMlaSizes& size = scratch.size;
  const TensorView maxima =
      context.scratch.take({size.heads, size.queries}, dtype_of<A>, "sparse mla maxima");
  if (is_dry(context)) return;
  const auto stream = native_stream(context);
  if (!scratch.nothing()) {
    auto args = scratch.args(context, op);
    allow_shared_memory(forward_kernel<A, D>, scratch.shared_bytes());
    for (; args.first < size.queries; args.first += scratch.rows) {
      const dim3 grid(static_cast<unsigned>(std::min(scratch.rows, size.queries - args.first)),
                      static_cast<unsigned>(size.heads));
      forward_kernel<<<grid, kThreads, scratch.shared_bytes(), stream>>>(
          args, reinterpret_cast<D*>(op.o.as<T>()), op.lse.as<A>(), maxima.as<A>());
      check_launch("kernel sparse_mla_forward (plain)");
    }
  }
  combine_row_maxima(stream, op.max_logit, maxima, op.accumulate_max);
}

template <class T>
void backward(CudaContext& context, const SparseMlaBackward& op) {
  using A = acc_t<T>;
  using D = device_t<T>;
  const Arena::Mark mark(context.scratch);
  const PlainScratch<T> scratch(context.scratch, op, true);
  const SparseMlaSizes& size = scratch.size;
  const KeySumsMemory memory = KeySumsMemory::take(context.scratch, op);
  if (is_dry(context)) return;
  const auto stream = native_stream(context);
  prepare_key_sums(stream, memory, op, 1.0);
  if (!scratch.nothing()) {
    auto args = scratch.args(context, op);
    const BackwardArgs<A, D> b{reinterpret_cast<const D*>(op.d_o.as<T>()),
                               memory.delta.as<A>(),
                               memory.log_sum.as<A>(),
                               reinterpret_cast<D*>(op.dq.as<T>()),
                               key_sums_view<A>(memory, op)};
    allow_shared_memory(query_kernel<A, D>, scratch.shared_bytes());
    for (; args.first < size.queries; args.first += scratch.rows) {
      const auto rows = static_cast<unsigned>(std::min(scratch.rows, size.queries - args.first));
      query_kernel<<<dim3(rows, static_cast<unsigned>(size.heads)),
                     kThreads,
                     scratch.shared_bytes(),
                     stream>>>(args, b);
      check_launch("kernel sparse_mla_backward (plain): queries");
      key_kernel<<<dim3(rows, static_cast<unsigned>((size.k + kKeysPerBlock - 1) / kKeysPerBlock)),
                   kThreads,
                   0,
                   stream>>>(args, b);
      check_launch("kernel sparse_mla_backward (plain): keys");
    }
  }
  finish_key_sums(stream, memory, op);
}

}  // namespace

void sparse_mla_plain(CudaContext& context, const SparseMlaForward& op) {
  dispatch_float(op.q.dtype(), [&]<class T>(TypeTag<T>) { forward<T>(context, op); });
}

void sparse_mla_plain(CudaContext& context, const SparseMlaBackward& op) {
  dispatch_float(op.q.dtype(), [&]<class T>(TypeTag<T>) { backward<T>(context, op); });
}

}  // namespace moesaic::cuda
