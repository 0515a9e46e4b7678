// Attention over depth, forward. plain: a block per token reads the sources twice, for the scores and for the mix. one_pass:
// a row lives in registers, each source is read once, and the softmax is kept up source by source.
#include <cuda_pipeline_primitives.h>

#include "kernels/cuda/attn_res.cuh"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 256;
constexpr int kStages = 4;  // rows of a block that are in shared memory, or on their way to it

template <class T, class A>
struct Forward {
  T* h;
  A* p;
  std::int64_t tokens, d;
  int n;
  A eps;
};

template <class T, class W, class A>
__global__ void __launch_bounds__(kThreads)
    plain_kernel(Forward<T, A> a,
                 const __grid_constant__ SourcePointers<T, kAttnResMaxSources> sources,
                 const W* query,
                 const W* norm) {
  __shared__ A p[kAttnResMaxSources];
  for (std::int64_t t = blockIdx.x; t < a.tokens; t += gridDim.x) {
    for (int i = 0; i < a.n; ++i) {
      const T* v = sources.v[i] + t * a.d;
      A squares = 0, dot = 0;
      for (std::int64_t c = threadIdx.x; c < a.d; c += kThreads) {
        const A x = widen<A>(v[c]);
        squares += x * x;
        dot += x * (widen<A>(query[c]) * widen<A>(norm[c]));
      }
      squares = row_sum<kThreads>(squares);
      dot = row_sum<kThreads>(dot);
      if (threadIdx.x == 0) p[i] = dot / sqrt(squares / static_cast<A>(a.d) + a.eps);
    }
    __syncthreads();
    A largest = p[0];
    for (int i = 1; i < a.n; ++i)
      largest = max(largest, p[i]);
    A sum = 0;
    for (int i = 0; i < a.n; ++i)
      sum += exp(p[i] - largest);
    __syncthreads();
    for (int i = threadIdx.x; i < a.n; i += kThreads) {
      p[i] = exp(p[i] - largest) / sum;
      a.p[t * a.n + i] = p[i];
    }
    __syncthreads();
    for (std::int64_t c = threadIdx.x; c < a.d; c += kThreads) {
      A mixed = 0;
      for (int i = 0; i < a.n; ++i)
        mixed += p[i] * widen<A>(sources.v[i][t * a.d + c]);
      a.h[t * a.d + c] = round_to<T>(mixed);
    }
    __syncthreads();  // the next token writes p again
  }
}

// Steps are (token, source) pairs; the rows of the next ones are on their way to shared memory while this one is summed. A
// thread copies what it reads itself, so copies need no barrier. Two buffers of partial sums alternate, so one barrier per
// step is enough.
template <class W>
__global__ void __launch_bounds__(kOnePassThreads)
    one_pass_kernel(Forward<__nv_bfloat16, float> a,
                    const __grid_constant__ SourcePointers<__nv_bfloat16, kOnePassSources> sources,
                    const W* query,
                    const W* norm) {
  constexpr int kMaxWarps = kOnePassThreads / kWarp;
  extern __shared__ float4 planes[];  // query (.) norm, then the rows
  __shared__ float2 partial[2][kMaxWarps];
  const int vectors = static_cast<int>(a.d) / kOnePassVector;
  const int warp = static_cast<int>(threadIdx.x) / kWarp,
            warps = static_cast<int>(blockDim.x) / kWarp;
  fold_query(planes, query, norm, vectors);
  float mixed[kOnePassChunks][kOnePassVector] = {};
  float largest = -INFINITY, total = 0, own_score = 0;  // thread i remembers the score of source i
  auto* rows = reinterpret_cast<RawVec*>(planes + 2 * vectors);
  const int tokens = static_cast<int>(a.tokens);
  int coming_t = static_cast<int>(blockIdx.x), coming_i = 0;
  const auto start_copy = [&](int stage) {
    if (coming_t < tokens) {
      const __nv_bfloat16* source = sources.v[coming_i] + coming_t * a.d;
#pragma unroll
      for (int k = 0; k < kOnePassChunks; ++k) {
        const int at = static_cast<int>(threadIdx.x + k * blockDim.x);
        if (at < vectors) {
          __pipeline_memcpy_async(
              rows + stage * vectors + at, source + at * kOnePassVector, sizeof(RawVec));
        }
      }
      if (++coming_i == a.n) {
        coming_i = 0;
        coming_t += static_cast<int>(gridDim.x);
      }
    }
    __pipeline_commit();  // also without copies: stages are counted by groups
  };
  for (int s = 0; s < kStages - 1; ++s)
    start_copy(s);
  int stage = 0, half = 0;
  for (int t = static_cast<int>(blockIdx.x), i = 0; t < tokens;) {
    const bool last = i + 1 == a.n;
    __pipeline_wait_prior(kStages - 2);
    RawVec row[kOnePassChunks];
#pragma unroll
    for (int k = 0; k < kOnePassChunks; ++k) {
      const int at = static_cast<int>(threadIdx.x + k * blockDim.x);
      row[k] = at < vectors ? rows[stage * vectors + at] : RawVec{};
    }
    start_copy((stage + kStages - 1) % kStages);
    stage = (stage + 1) % kStages;
    float squares = 0, dot = 0;
#pragma unroll
    for (int k = 0; k < kOnePassChunks; ++k) {
      const int at = static_cast<int>(threadIdx.x + k * blockDim.x);
      if (at >= vectors) continue;
      float om[kOnePassVector];
      read_planes(om, planes, vectors, at);
#pragma unroll
      for (int j = 0; j < kOnePassVector; ++j) {
        const float x = widen<float>(row[k].v[j]);
        squares += x * x;
        dot += x * om[j];
      }
    }
    squares = warp_sum(squares);
    dot = warp_sum(dot);
    if (threadIdx.x % kWarp == 0) partial[half][warp] = {squares, dot};
    __syncthreads();
    squares = dot = 0;
    for (int w = 0; w < warps; ++w) {
      squares += partial[half][w].x;
      dot += partial[half][w].y;
    }
    half ^= 1;
    const float score = dot / sqrtf(squares / static_cast<float>(a.d) + a.eps);
    if (static_cast<int>(threadIdx.x) == i) own_score = score;
    const float bar = fmaxf(largest, score);
    const float keep = expf(largest - bar), weight = expf(score - bar);
    largest = bar;
    total = total * keep + weight;
#pragma unroll
    for (int k = 0; k < kOnePassChunks; ++k) {
#pragma unroll
      for (int j = 0; j < kOnePassVector; ++j)
        mixed[k][j] = mixed[k][j] * keep + weight * widen<float>(row[k].v[j]);
    }
    if (last) {
      const float inv = 1.0F / total;
      if (static_cast<int>(threadIdx.x) < a.n)
        a.p[t * a.n + threadIdx.x] = expf(own_score - largest) * inv;
#pragma unroll
      for (int k = 0; k < kOnePassChunks; ++k) {
        const int at = static_cast<int>(threadIdx.x + k * blockDim.x);
        RawVec out;
#pragma unroll
        for (int j = 0; j < kOnePassVector; ++j) {
          out.v[j] = round_to<__nv_bfloat16>(mixed[k][j] * inv);
          mixed[k][j] = 0;
        }
        if (at < vectors) store<kOnePassVector>(a.h + t * a.d + at * kOnePassVector, out);
      }
      largest = -INFINITY;
      total = 0;
    }
    i = last ? 0 : i + 1;
    if (last) t += static_cast<int>(gridDim.x);
  }
}

template <class T>
Forward<device_t<T>, acc_t<T>> arguments(const AttnResForward& op) {
  using A = acc_t<T>;
  return {device_data<T>(op.h),
          op.p.as<A>(),
          op.h.dim(0),
          op.h.dim(1),
          static_cast<int>(op.sources.size()),
          static_cast<A>(op.eps)};
}

bool one_pass(const CudaContext& context, const AttnResForward& op) {
  return may_specialise(context) && op.h.dtype() == DType::bf16 && op.h.dim(0) < kOnePassTokens &&
         fits_one_pass(op.sources, op.h.dim(1)) &&
         all_aligned({op.h.data(), op.query.data(), op.norm.data()});
}

}  // namespace

void launch(CudaContext& context, const AttnResForward& op) {
  const bool fast = one_pass(context, op);
  report_path(context, op, fast ? "one_pass" : "plain");
  if (is_dry(context) || op.h.numel() == 0) return;
  const auto stream = native_stream(context);
  const unsigned grid = grid_for(context, op.h.dim(0));
  dispatch_float(op.h.dtype(), [&]<class T>(TypeTag<T>) {
    dispatch_weight<T>(op.query.dtype(), [&]<class W>(TypeTag<W>) {
      const auto* query = device_data<W>(op.query);
      const auto* norm = device_data<W>(op.norm);
      if constexpr (std::is_same_v<T, bf16>) {
        if (fast) {
          const auto shared =
              static_cast<int>(op.h.dim(1) * std::int64_t{sizeof(float) + kStages * sizeof(bf16)});
          MOESAIC_CUDA_CALL(cudaFuncSetAttribute(
              one_pass_kernel<device_t<W>>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
          one_pass_kernel<<<grid, one_pass_threads(op.h.dim(1)), shared, stream>>>(
              arguments<T>(op), source_pointers<T, kOnePassSources>(op.sources), query, norm);
          return;
        }
      }
      plain_kernel<<<grid, kThreads, 0, stream>>>(
          arguments<T>(op), source_pointers<T, kAttnResMaxSources>(op.sources), query, norm);
    });
  });
  check_launch("kernel attn_res_forward");
}

}  // namespace moesaic
