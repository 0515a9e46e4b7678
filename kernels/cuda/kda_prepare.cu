// The operands of the KDA core and their gradients. Memory-bound: every tensor is read and written once. A few lanes of a
// warp share a row of one head; the parameters' gradients go by columns, in two stages of fixed order.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/kda_gate.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/token_sums.cuh"
#include "kernels/ops/kda_prepare.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 256;
constexpr int kColumns =
    32;  // gate gradients: a block is this many groups of channels x kLanes tokens
constexpr int kLanes = kThreads / kColumns;
constexpr int kAhead = 4;  // rows asked for at a time, so that enough bytes are on their way
constexpr std::int64_t kBlockTokens =
    256;  // tokens per partial sum (a multiple of it for many tokens)
constexpr std::int64_t kMaxBlocks = 512;  // bounds the scratch of partial sums

template <int Lanes, class A>
__device__ __forceinline__ A lanes_sum(A x) {
#pragma unroll
  for (int offset = Lanes / 2; offset > 0; offset /= 2)
    x += __shfl_xor_sync(0xffffffffU, x, offset);
  return x;
}

/// A row of one head, as the lane at hand sees it: pieces of N channels from lane * N on. Once: there is one piece at most,
/// so that it stays in registers between its uses, and all loads can be asked for at the start.
template <int N, int Lanes, bool Once>
struct RowPieces {
  std::int64_t size;
  int lane;

  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
    if constexpr (Once) {
      if (lane * N < size) f(lane * N);
    } else {
      for (std::int64_t c = lane * N; c < size; c += Lanes * N)
        f(c);
    }
  }
  /// What a lane holds of a row from the start on; nothing unless Once. `valid`: the row exists.
  template <class T>
  __device__ __forceinline__ Vec<T, N> ahead(const T* row, bool valid) const {
    if (Once && valid && lane * N < size) return load<N>(row + lane * N);
    return {};
  }
  template <class T>
  __device__ __forceinline__ Vec<T, N> piece(const Vec<T, N>& ahead,
                                             const T* row,
                                             std::int64_t c) const {
    if constexpr (Once) return ahead;
    return load<N>(row + c);
  }
};

/// Rows one after the other, all of a warp's together: f(row, its head, whether it exists).
template <int Rows, class F>
__device__ __forceinline__ void for_rows(std::int64_t rows, std::int64_t heads, const F& f) {
  const std::int64_t step = std::int64_t{gridDim.x} * Rows, first = std::int64_t{blockIdx.x} * Rows;
  const int own = static_cast<int>(threadIdx.x) * Rows / kThreads;
  std::int64_t h = (first + own) % heads;
  const std::int64_t h_step = step % heads;
  for (std::int64_t r = first; r < rows; r += step) {
    f(r + own, h, r + own < rows);
    h += h_step;
    if (h >= heads) h -= heads;
  }
}

/// out = in * rstd * scale; returns rstd. `valid`: the row exists (all lanes take part in the sum).
template <class T, class A, int N, int Lanes, bool Once>
__device__ __forceinline__ A normalise(T* out,
                                       const T* in,
                                       const Vec<T, N>& ahead,
                                       const RowPieces<N, Lanes, Once>& row,
                                       bool valid,
                                       A scale,
                                       A eps) {
  A sum = 0;
  if (valid) {
    row.each([&](std::int64_t c) {
      const auto x = row.piece(ahead, in, c);
#pragma unroll
      for (int i = 0; i < N; ++i)
        sum += widen<A>(x.v[i]) * widen<A>(x.v[i]);
    });
  }
  const A rstd = A(1) / sqrt(lanes_sum<Lanes>(sum) + eps);
  const A factor = rstd * scale;
  if (valid) {
    row.each([&](std::int64_t c) {
      auto x = row.piece(ahead, in, c);
#pragma unroll
      for (int i = 0; i < N; ++i)
        x.v[i] = round_to<T>(widen<A>(x.v[i]) * factor);
      store<N>(out + c, x);
    });
  }
  return rstd;
}

template <class T, class A>
struct GateArguments {
  const T* z;
  const A* a_log;
  const A* bias;
  A g_min;
  bool bounded;
};

template <class T, class A>
__device__ __forceinline__ A gate(const GateArguments<T, A>& gate, A zb, A scale) {
  if (gate.bounded) return gate.g_min * kda::sigmoid<kda::kFastMath<T>>(scale * zb);
  return -scale * kda::softplus<kda::kFastMath<T>>(zb);
}

template <class T, class A>
struct ForwardRows {
  T *q, *k;
  A *g, *q_rstd, *k_rstd, *beta;
  const T *q_raw, *k_raw;
  std::int64_t rows, heads, size;
  A q_scale, eps;
};

// q may be q_raw, k may be k_raw: a lane reads what it overwrites itself, before.
template <class T, class B, class A, int N, int Lanes, bool Once>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(ForwardRows<T, A> io, GateArguments<T, A> gates, const B* beta_logit) {
  const RowPieces<N, Lanes, Once> row{io.size, static_cast<int>(threadIdx.x) % Lanes};
  for_rows<kThreads / Lanes>(io.rows, io.heads, [&](std::int64_t r, std::int64_t h, bool valid) {
    const std::int64_t at = r * io.size;
    const auto q_ahead = row.ahead(io.q_raw + at, valid), k_ahead = row.ahead(io.k_raw + at, valid),
               z_ahead = row.ahead(gates.z + at, valid);
    const auto bias_ahead = row.ahead(gates.bias + h * io.size, valid);
    const A scale = exp(gates.a_log[h]);
    const A q_rstd = normalise(io.q + at, io.q_raw + at, q_ahead, row, valid, io.q_scale, io.eps);
    const A k_rstd = normalise(io.k + at, io.k_raw + at, k_ahead, row, valid, A(1), io.eps);
    if (!valid) return;
    row.each([&](std::int64_t c) {
      const auto z = row.piece(z_ahead, gates.z + at, c);
      const auto bias = row.piece(bias_ahead, gates.bias + h * io.size, c);
      Vec<A, N> g;
#pragma unroll
      for (int i = 0; i < N; ++i)
        g.v[i] = gate(gates, widen<A>(z.v[i]) + bias.v[i], scale);
      store<N>(io.g + at + c, g);
    });
    if (row.lane == 0) {
      io.q_rstd[r] = q_rstd;
      io.k_rstd[r] = k_rstd;
      io.beta[r] = kda::sigmoid<kda::kFastMath<T>>(widen<A>(beta_logit[r]));
    }
  });
}

/// dx = rstd scale (dy - y <y, dy> / scale^2), where y is the scaled result.
template <class T, class A, int N, int Lanes, bool Once>
__device__ __forceinline__ void normalise_backward(T* dx,
                                                   const T* dy,
                                                   const T* y,
                                                   const Vec<T, N>& dy_ahead,
                                                   const Vec<T, N>& y_ahead,
                                                   const RowPieces<N, Lanes, Once>& row,
                                                   bool valid,
                                                   A rstd,
                                                   A scale) {
  A dot = 0;
  if (valid) {
    row.each([&](std::int64_t c) {
      const auto yv = row.piece(y_ahead, y, c), d = row.piece(dy_ahead, dy, c);
#pragma unroll
      for (int i = 0; i < N; ++i)
        dot += widen<A>(yv.v[i]) * widen<A>(d.v[i]);
    });
  }
  dot = lanes_sum<Lanes>(dot) / (scale * scale);
  if (!valid) return;
  const A factor = rstd * scale;
  row.each([&](std::int64_t c) {
    const auto yv = row.piece(y_ahead, y, c);
    auto d = row.piece(dy_ahead, dy, c);
#pragma unroll
    for (int i = 0; i < N; ++i)
      d.v[i] = round_to<T>(factor * (widen<A>(d.v[i]) - widen<A>(yv.v[i]) * dot));
    store<N>(dx + c, d);
  });
}

template <class T, class A>
struct BackwardRows {
  T *dq_raw, *dk_raw;
  const T *dq, *dk, *q, *k;
  const A *q_rstd, *k_rstd, *dbeta;
  std::int64_t rows, size;
  A q_scale;
};

template <class T, class B, class A, int N, int Lanes, bool Once>
__global__ void __launch_bounds__(kThreads)
    rows_backward_kernel(BackwardRows<T, A> io, B* dbeta_logit, const B* beta_logit) {
  const RowPieces<N, Lanes, Once> row{io.size, static_cast<int>(threadIdx.x) % Lanes};
  for_rows<kThreads / Lanes>(io.rows, 1, [&](std::int64_t r, std::int64_t, bool valid) {
    const std::int64_t at = r * io.size;
    const auto dq = row.ahead(io.dq + at, valid), q = row.ahead(io.q + at, valid),
               dk = row.ahead(io.dk + at, valid), k = row.ahead(io.k + at, valid);
    const A q_rstd = valid ? io.q_rstd[r] : A(0), k_rstd = valid ? io.k_rstd[r] : A(0);
    normalise_backward(
        io.dq_raw + at, io.dq + at, io.q + at, dq, q, row, valid, q_rstd, io.q_scale);
    normalise_backward(io.dk_raw + at, io.dk + at, io.k + at, dk, k, row, valid, k_rstd, A(1));
    if (valid && row.lane == 0) {
      A s, complement;
      kda::sigmoid_pair<kda::kFastMath<T>>(widen<A>(beta_logit[r]), s, complement);
      dbeta_logit[r] = round_to<B>(io.dbeta[r] * s * complement);
    }
  });
}

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
