// Rope: a block takes a few tokens, forms their angles once (in double), and turns the pairs of all heads.
#include <limits>

#include "kernels/cuda/vectors.cuh"
#include "kernels/ops/rope.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 256;
constexpr int kMaxPairs = 512;
constexpr std::int64_t kMaxAngles = 1024;  // of a block's tokens; bounds the shared memory

template <class T>
struct Layout {
  T* x;
  const std::int32_t* positions;
  std::int64_t tokens, width, begin;
  int heads, pairs, tokens_per_block;  // a block's elements are counted in int
  double theta;
  bool inverse;
};

// A piece is what one thread turns at a time: N neighbouring elements (a pair when N is 1) when interleaved, else N elements
// and their N partners.
template <int N, bool Interleaved>
__device__ __forceinline__ int pieces_of(int pairs) {
  return Interleaved && N > 1 ? 2 * pairs / N : pairs / N;
}
template <class T, class A, int N, bool Interleaved>
__device__ __forceinline__ void turn(T* row, int piece, int pairs, const A* cosine, const A* sine) {
  if constexpr (Interleaved && N == 1) {
    const A a = widen<A>(row[2 * piece]), b = widen<A>(row[2 * piece + 1]);
    row[2 * piece] = round_to<T>(a * cosine[piece] - b * sine[piece]);
    row[2 * piece + 1] = round_to<T>(a * sine[piece] + b * cosine[piece]);
  } else if constexpr (Interleaved) {
    auto v = load<N>(row + piece * N);
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const int j = (piece * N + i) / 2;
      const A a = widen<A>(v.v[i]), b = widen<A>(v.v[i + 1]);
      v.v[i] = round_to<T>(a * cosine[j] - b * sine[j]);
      v.v[i + 1] = round_to<T>(a * sine[j] + b * cosine[j]);
    }
    store<N>(row + piece * N, v);
  } else {
    auto av = load<N>(row + piece * N);
    auto bv = load<N>(row + pairs + piece * N);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int j = piece * N + i;
      const A a = widen<A>(av.v[i]), b = widen<A>(bv.v[i]);
      av.v[i] = round_to<T>(a * cosine[j] - b * sine[j]);
      bv.v[i] = round_to<T>(a * sine[j] + b * cosine[j]);
    }
    store<N>(row + piece * N, av);
    store<N>(row + pairs + piece * N, bv);
  }
}

template <class T, class A, int N, bool Interleaved>
__global__ void __launch_bounds__(kThreads) rope_kernel(Layout<T> p) {
  __shared__ double frequency[kMaxPairs];
  __shared__ A cosine[kMaxAngles], sine[kMaxAngles];
  for (int j = threadIdx.x; j < p.pairs; j += kThreads)
    frequency[j] = pow(p.theta, -static_cast<double>(j) / p.pairs);
  const int pieces = pieces_of<N, Interleaved>(p.pairs);
  for (std::int64_t first = std::int64_t{blockIdx.x} * p.tokens_per_block; first < p.tokens;
       first += std::int64_t{gridDim.x} * p.tokens_per_block) {
    const int count =
        static_cast<int>(min(static_cast<std::int64_t>(p.tokens_per_block), p.tokens - first));
    __syncthreads();  // frequencies are there, and nobody reads the angles of the last round
    for (int i = threadIdx.x; i < count * p.pairs; i += kThreads) {
      const double angle =
          static_cast<double>(p.positions[first + i / p.pairs]) * frequency[i % p.pairs];
      double s, c;
      sincos(angle, &s, &c);
      cosine[i] = static_cast<A>(c);
      sine[i] = static_cast<A>(p.inverse ? -s : s);
    }
    __syncthreads();
    const int rows = count * p.heads;
    for (int i = threadIdx.x; i < rows * pieces; i += kThreads) {
      const int row = i / pieces, token = row / p.heads;
      turn<T, A, N, Interleaved>(p.x + (first * p.heads + row) * p.width + p.begin,
                                 i - row * pieces,
                                 p.pairs,
                                 cosine + token * p.pairs,
                                 sine + token * p.pairs);
    }
  }
}

template <class T>
void rotate(const CudaContext& context, const Rope& op) {
  const std::int64_t pairs = op.rotary_width / 2, tokens = op.x.dim(0), heads = op.x.dim(1);
  MOESAIC_CHECK(heads * pairs <= std::numeric_limits<int>::max() / 2,
                "too many heads for one block");
  // Few heads: several tokens, so that a block has work for all its threads.
  const std::int64_t pieces = std::max<std::int64_t>(1, heads * op.rotary_width / kWide<T>);
  const std::int64_t tokens_per_block =
      std::clamp<std::int64_t>(2 * kThreads / pieces, 1, kMaxAngles / pairs);
  const Layout<device_t<T>> p{device_data<T>(op.x),
                              op.positions.as<std::int32_t>(),
                              tokens,
                              op.x.dim(2),
                              op.begin,
                              static_cast<int>(heads),
                              static_cast<int>(pairs),
                              static_cast<int>(tokens_per_block),
                              op.theta,
                              op.inverse};
  const unsigned grid = grid_for(context, (tokens + tokens_per_block - 1) / tokens_per_block);
  const auto stream = native_stream(context);
  constexpr int kFull = kWide<T>;
  const bool wide = all_aligned({op.x.data()}) && op.x.dim(2) % kFull == 0 &&
                    op.begin % kFull == 0 &&
                    (op.interleaved ? op.rotary_width : pairs) % kFull == 0;
  if (op.interleaved) {
    wide ? rope_kernel<device_t<T>, acc_t<T>, kFull, true><<<grid, kThreads, 0, stream>>>(p)
         : rope_kernel<device_t<T>, acc_t<T>, 1, true><<<grid, kThreads, 0, stream>>>(p);
  } else {
    wide ? rope_kernel<device_t<T>, acc_t<T>, kFull, false><<<grid, kThreads, 0, stream>>>(p)
         : rope_kernel<device_t<T>, acc_t<T>, 1, false><<<grid, kThreads, 0, stream>>>(p);
  }
  check_launch("kernel rope");
}

}  // namespace

void launch(CudaContext& context, const Rope& op) {
  if (is_dry(context) || op.x.numel() == 0 || op.rotary_width == 0) return;
  dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) { rotate<T>(context, op); });
}

}  // namespace moesaic
