// The operands of the KDA core and their gradients. Memory-bound: every tensor is read and written once. A few lanes of a
// warp share a row of one head; the parameters' gradients go by columns, in two stages of fixed order.
#include "kernels/cuda/kda_prepare_rows.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/token_sums.cuh"
#include "kernels/ops/kda_prepare.h"

namespace moesaic {
namespace {

using namespace cuda;           // NOLINT(google-build-using-namespace): device helpers
using namespace cuda::prepare;  // NOLINT(google-build-using-namespace): kernels over rows

constexpr int kColumns =
    32;  // gate gradients: a block is this many groups of channels x kLanes tokens
constexpr int kLanes = kThreads / kColumns;
constexpr int kAhead = 4;  // rows asked for at a time, so that enough bytes are on their way
constexpr std::int64_t kBlockTokens =
    256;  // tokens per partial sum (a multiple of it for many tokens)
constexpr std::int64_t kMaxBlocks = 512;  // bounds the scratch of partial sums

/// dz, and per block of tokens and channel the partial sums of ddt_bias and of da_log (null: not wanted). Channels are
/// those of all heads in a row.
template <class T, class A, int N>
__global__ void __launch_bounds__(kThreads) gate_backward_kernel(T* dz,
                                                                 A* bias_partials,
                                                                 A* a_partials,
                                                                 const A* dg,
                                                                 GateArguments<T, A> gates,
                                                                 std::int64_t tokens,
                                                                 std::int64_t channels,
                                                                 std::int64_t size,
                                                                 std::int64_t tokens_per_block) {
  constexpr bool kFast = kda::kFastMath<T>;
  const std::int64_t c = (std::int64_t{blockIdx.y} * kColumns + threadIdx.x) * N;
  const std::int64_t begin = std::int64_t{blockIdx.x} * tokens_per_block;
  const std::int64_t end = min(tokens, begin + tokens_per_block);
  A dbias[N] = {}, da[N] = {};
  if (c < channels) {
    A scale[N], bias[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      scale[i] = exp(gates.a_log[(c + i) / size]);
      bias[i] = gates.bias[c + i];
    }
    for (std::int64_t t0 = begin + threadIdx.y; t0 < end; t0 += kAhead * kLanes) {
      Vec<T, N> z[kAhead];
      Vec<A, N> d[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const std::int64_t t = t0 + u * kLanes;
        if (t >= end) break;
        z[u] = load<N>(gates.z + t * channels + c);
        d[u] = load<N>(dg + t * channels + c);
      }
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const std::int64_t t = t0 + u * kLanes;
        if (t >= end) break;
        Vec<T, N> out;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const A zb = widen<A>(z[u].v[i]) + bias[i];
          A grad;
          if (gates.bounded) {
            A s, complement;
            kda::sigmoid_pair<kFast>(scale[i] * zb, s, complement);
            grad = scale[i] * gates.g_min * s * complement * d[u].v[i];
            da[i] += zb * grad;
          } else {
            grad = -scale[i] * kda::sigmoid<kFast>(zb) * d[u].v[i];
            da[i] -= scale[i] * kda::softplus<kFast>(zb) * d[u].v[i];
          }
          dbias[i] += grad;
          out.v[i] = round_to<T>(grad);
        }
        store<N>(dz + t * channels + c, out);
      }
    }
  }
  __shared__ A lanes[kLanes][2 * N][kColumns];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    lanes[threadIdx.y][i][threadIdx.x] = dbias[i];
    lanes[threadIdx.y][N + i][threadIdx.x] = da[i];
  }
  __syncthreads();
  if (c >= channels) return;
  for (int e = threadIdx.y; e < 2 * N; e += kLanes) {
    A* out = e < N ? bias_partials : a_partials;
    if (out == nullptr) continue;
    A sum = lanes[0][e][threadIdx.x];
#pragma unroll
    for (int y = 1; y < kLanes; ++y)
      sum += lanes[y][e][threadIdx.x];
    out[std::int64_t{blockIdx.x} * channels + c + e % N] = sum;
  }
}

/// da_log[h] += sum over blocks of tokens and the head's channels.
template <class A>
__global__ void __launch_bounds__(kThreads) head_sums_kernel(
    A* da_log, const A* partials, std::int64_t blocks, std::int64_t heads, std::int64_t size) {
  const std::int64_t h = blockIdx.x;
  A sum = 0;
  for (std::int64_t i = threadIdx.x; i < blocks * size; i += kThreads)
    sum += partials[i / size * heads * size + h * size + i % size];
  sum = row_sum<kThreads>(sum);
  if (threadIdx.x == 0) da_log[h] += sum;
}

// Calls f with channels per access (16 bytes of T when every row starts aligned, else 1), the lanes that share a row, and
// whether they see all of it in one access each.
template <class T, class F>
void with_row_shape(std::int64_t size, std::initializer_list<const void*> pointers, F&& f) {
  using std::bool_constant, std::integral_constant;
  constexpr int kWide = 16 / sizeof(T);
  bool wide = size % kWide == 0;
  for (const void* p : pointers)
    wide = wide && is_aligned(p, 16);
  if (!wide)
    return f(integral_constant<int, 1>{}, integral_constant<int, kWarp>{}, bool_constant<false>{});
  if (size <= 16 * kWide)
    return f(integral_constant<int, kWide>{}, integral_constant<int, 16>{}, bool_constant<true>{});
  if (size <= 32 * kWide)
    return f(integral_constant<int, kWide>{}, integral_constant<int, 32>{}, bool_constant<true>{});
  f(integral_constant<int, kWide>{}, integral_constant<int, kWarp>{}, bool_constant<false>{});
}

template <class T, class Op>
GateArguments<device_t<T>, acc_t<T>> gate_arguments(const Op& op) {
  using A = acc_t<T>;
  return {reinterpret_cast<const device_t<T>*>(op.z.template as<T>()),
          op.a_log.template as<A>(),
          op.dt_bias.template as<A>(),
          static_cast<A>(op.g_min.value_or(0.0)),
          op.g_min.has_value()};
}

template <class T, class B>
void forward(const CudaContext& context, const KdaPrepareForward& op) {
  using A = acc_t<T>;
  using D = device_t<T>;
  const std::int64_t heads = op.q_raw.dim(1), size = op.q_raw.dim(2),
                     rows = op.q_raw.dim(0) * heads;
  const ForwardRows<D, A> io{reinterpret_cast<D*>(op.q.as<T>()),
                             reinterpret_cast<D*>(op.k.as<T>()),
                             op.g.as<A>(),
                             op.q_rstd.as<A>(),
                             op.k_rstd.as<A>(),
                             op.beta.as<A>(),
                             reinterpret_cast<const D*>(op.q_raw.as<T>()),
                             reinterpret_cast<const D*>(op.k_raw.as<T>()),
                             rows,
                             heads,
                             size,
                             A(1) / std::sqrt(static_cast<A>(size)),
                             static_cast<A>(op.eps)};
  const auto gates = gate_arguments<T>(op);
  const auto stream = native_stream(context);
  with_row_shape<T>(
      size,
      {io.q, io.k, io.g, io.q_raw, io.k_raw, gates.z, gates.bias},
      [&]<int N, int Lanes, bool Once>(std::integral_constant<int, N>,
                                       std::integral_constant<int, Lanes>,
                                       std::bool_constant<Once>) {
        constexpr int kRows = kThreads / Lanes;
        forward_kernel<D, device_t<B>, A, N, Lanes, Once>
            <<<grid_for(context, (rows + kRows - 1) / kRows, 16), kThreads, 0, stream>>>(
                io, gates, reinterpret_cast<const device_t<B>*>(op.beta_logit.as<B>()));
      });
  check_launch("kernel kda_prepare_forward");
}

template <class T, class B>
void rows_backward(const CudaContext& context, const KdaPrepareBackward& op) {
  using A = acc_t<T>;
  using D = device_t<T>;
  const std::int64_t size = op.q.dim(2), rows = op.q.dim(0) * op.q.dim(1);
  const BackwardRows<D, A> io{reinterpret_cast<D*>(op.dq_raw.as<T>()),
                              reinterpret_cast<D*>(op.dk_raw.as<T>()),
                              reinterpret_cast<const D*>(op.dq.as<T>()),
                              reinterpret_cast<const D*>(op.dk.as<T>()),
                              reinterpret_cast<const D*>(op.q.as<T>()),
                              reinterpret_cast<const D*>(op.k.as<T>()),
                              op.q_rstd.as<A>(),
                              op.k_rstd.as<A>(),
                              op.dbeta.as<A>(),
                              rows,
                              size,
                              A(1) / std::sqrt(static_cast<A>(size))};
  const auto stream = native_stream(context);
  with_row_shape<T>(
      size,
      {io.dq_raw, io.dk_raw, io.dq, io.dk, io.q, io.k},
      [&]<int N, int Lanes, bool Once>(std::integral_constant<int, N>,
                                       std::integral_constant<int, Lanes>,
                                       std::bool_constant<Once>) {
        constexpr int kRows = kThreads / Lanes;
        rows_backward_kernel<D, device_t<B>, A, N, Lanes, Once>
            <<<grid_for(context, (rows + kRows - 1) / kRows, 16), kThreads, 0, stream>>>(
                io,
                reinterpret_cast<device_t<B>*>(op.dbeta_logit.as<B>()),
                reinterpret_cast<const device_t<B>*>(op.beta_logit.as<B>()));
      });
  check_launch("kernel kda_prepare_backward: rows");
}

struct TokenBlocks {
  std::int64_t tokens_per_block = kBlockTokens;
  std::int64_t count = 0;
  explicit TokenBlocks(std::int64_t tokens) {
    constexpr std::int64_t kSpan = kBlockTokens * kMaxBlocks;
    tokens_per_block *= std::max<std::int64_t>(1, (tokens + kSpan - 1) / kSpan);
    count = (tokens + tokens_per_block - 1) / tokens_per_block;
  }
};

template <class T>
void gate_backward(const CudaContext& context,
                   const KdaPrepareBackward& op,
                   TensorView bias_partials,
                   TensorView a_partials) {
  using A = acc_t<T>;
  using D = device_t<T>;
  const std::int64_t tokens = op.q.dim(0), heads = op.q.dim(1), size = op.q.dim(2),
                     channels = heads * size;
  const TokenBlocks blocks(tokens);
  const auto gates = gate_arguments<T>(op);
  const auto stream = native_stream(context);
  auto* dz = reinterpret_cast<D*>(op.dz.as<T>());
  const A* dg = op.dg.as<A>();
  const auto run = [&]<int N>(std::integral_constant<int, N>) {
    const dim3 grid(static_cast<unsigned>(blocks.count),
                    static_cast<unsigned>((channels + kColumns * N - 1) / (kColumns * N)));
    gate_backward_kernel<D, A, N>
        <<<grid, dim3(kColumns, kLanes), 0, stream>>>(dz,
                                                      bias_partials.as<A>(),
                                                      a_partials.as<A>(),
                                                      dg,
                                                      gates,
                                                      tokens,
                                                      channels,
                                                      size,
                                                      blocks.tokens_per_block);
  };
  constexpr int kWide = 16 / sizeof(A);  // of dg, the widest
  if (channels % kWide == 0 && is_aligned(dz, 16) && is_aligned(dg, 16) &&
      is_aligned(gates.z, 16)) {
    run(std::integral_constant<int, kWide>{});
  } else {
    run(std::integral_constant<int, 1>{});
  }
  check_launch("kernel kda_prepare_backward: gates");
  if (!op.ddt_bias.empty()) {
    add_token_sums(stream, op.ddt_bias.as<A>(), bias_partials.as<A>(), blocks.count, channels);
  }
  if (!op.da_log.empty()) {
    head_sums_kernel<<<static_cast<unsigned>(heads), kThreads, 0, stream>>>(
        op.da_log.as<A>(), a_partials.as<A>(), blocks.count, heads, size);
    check_launch("kernel kda_prepare_backward: sums of heads");
  }
}

}  // namespace

void launch(CudaContext& context, const KdaPrepareForward& op) {
  if (is_dry(context) || op.q_raw.numel() == 0) return;
  dispatch_float(op.q_raw.dtype(), [&]<class T>(TypeTag<T>) {
    dispatch_weight<T>(op.beta_logit.dtype(),
                       [&]<class B>(TypeTag<B>) { forward<T, B>(context, op); });
  });
}

void launch(CudaContext& context, const KdaPrepareBackward& op) {
  if (op.q.numel() == 0) return;
  const Arena::Mark mark(context.scratch);
  const Shape partials{TokenBlocks(op.q.dim(0)).count, op.q.dim(1) * op.q.dim(2)};
  TensorView bias_partials, a_partials;
  if (!op.ddt_bias.empty())
    bias_partials = context.scratch.take(partials, op.dg.dtype(), "kda_prepare.ddt_bias");
  if (!op.da_log.empty())
    a_partials = context.scratch.take(partials, op.dg.dtype(), "kda_prepare.da_log");
  if (is_dry(context)) return;
  dispatch_float(op.q.dtype(), [&]<class T>(TypeTag<T>) {
    gate_backward<T>(context, op, bias_partials, a_partials);
    dispatch_weight<T>(op.beta_logit.dtype(),
                       [&]<class B>(TypeTag<B>) { rows_backward<T, B>(context, op); });
  });
}

}  // namespace moesaic
