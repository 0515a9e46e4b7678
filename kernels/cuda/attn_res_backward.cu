// Attention over depth, backward: per token, sums over every source, then their gradients; blocks walk through fixed ranges of
// tokens and keep the column sums for query and norm. plain: any size. one_pass: a row in registers; the second reading of the
// sources, right after the first, comes from the level-two cache.
#include "kernels/cuda/attn_res.cuh"
#include "kernels/cuda/column_sums.cuh"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 256;
constexpr int kTokensPerBlock = 16;  // a multiple of it for many tokens
constexpr int kMaxBlocks = 1024;

// Gradients of the sources: null = nobody wants it; `wide` ones have the accumulation type.
template <int Max>
struct GradientPointers {
  void* v[Max];
  bool wide[Max];
};
template <int Max>
GradientPointers<Max> gradient_pointers(const AttnResBackward& op) {
  GradientPointers<Max> pointers{};
  for (std::size_t i = 0; i < op.dsources.size(); ++i) {
    pointers.v[i] = op.dsources[i].data();
    pointers.wide[i] = !op.dsources[i].empty() && op.dsources[i].dtype() != op.dh.dtype();
  }
  return pointers;
}

template <class T, class A>
struct Backward {
  const T* dh;
  const A* p;
  A* partials;  // [blocks, d], null when query and norm are frozen
  std::int64_t tokens, d, tokens_per_block;
  int n;
  A eps;
};

// Of one source and token: the gradient is  weight dh + ds_rho om - back v.
template <class A>
struct Coefficients {
  A weight, ds_rho, back;
};
// What the sums over a source's row give; rho, score and dp = <v, dh>.
template <class A>
struct Sums {
  A squares, dot, dp;
};
template <class A>
__device__ __forceinline__ Coefficients<A> coefficients(
    const Sums<A>& sums, A weight, A mean_dp, A d, A eps) {
  const A rho = A(1) / sqrt(sums.squares / d + eps);
  const A ds_rho = weight * (sums.dp - mean_dp) * rho;
  return {weight, ds_rho, ds_rho * rho * (sums.dot * rho) / d};
}

template <class G, class A>
__device__ __forceinline__ void add_to(G* at, A x) {
  *at = round_to<G>(widen<A>(*at) + x);
}

template <class T, class W, class A>
__global__ void __launch_bounds__(kThreads)
    plain_kernel(Backward<T, A> a,
                 const __grid_constant__ SourcePointers<T, kAttnResMaxSources> sources,
                 const __grid_constant__ GradientPointers<kAttnResMaxSources> gradients,
                 const W* query,
                 const W* norm) {
  __shared__ Sums<A> sums[kAttnResMaxSources];
  const auto om = [&](std::int64_t c) { return widen<A>(query[c]) * widen<A>(norm[c]); };
  A* dom = a.partials == nullptr ? nullptr : a.partials + std::int64_t{blockIdx.x} * a.d;
  if (dom != nullptr) {
    for (std::int64_t c = threadIdx.x; c < a.d; c += kThreads)
      dom[c] = 0;
  }
  const std::int64_t first = std::int64_t{blockIdx.x} * a.tokens_per_block,
                     end = min(a.tokens, first + a.tokens_per_block);
  for (std::int64_t t = first; t < end; ++t) {
    const T* dh = a.dh + t * a.d;
    for (int i = 0; i < a.n; ++i) {
      const T* v = sources.v[i] + t * a.d;
      A squares = 0, dot = 0, dp = 0;
      for (std::int64_t c = threadIdx.x; c < a.d; c += kThreads) {
        const A x = widen<A>(v[c]);
        squares += x * x;
        dot += x * om(c);
        dp += x * widen<A>(dh[c]);
      }
      squares = row_sum<kThreads>(squares);
      dot = row_sum<kThreads>(dot);
      dp = row_sum<kThreads>(dp);
      if (threadIdx.x == 0) sums[i] = {squares, dot, dp};
    }
    __syncthreads();
    A mean_dp = 0;  // <dh, h>
    for (int i = 0; i < a.n; ++i)
      mean_dp += a.p[t * a.n + i] * sums[i].dp;
    for (int i = 0; i < a.n; ++i) {
      const auto k = coefficients(sums[i], a.p[t * a.n + i], mean_dp, static_cast<A>(a.d), a.eps);
      const T* v = sources.v[i] + t * a.d;
      for (std::int64_t c = threadIdx.x; c < a.d; c += kThreads) {
        const A x = widen<A>(v[c]);
        if (dom != nullptr) dom[c] += k.ds_rho * x;
        if (gradients.v[i] == nullptr) continue;
        const A grad = k.weight * widen<A>(dh[c]) + k.ds_rho * om(c) - k.back * x;
        if (gradients.wide[i]) {
          add_to(static_cast<A*>(gradients.v[i]) + t * a.d + c, grad);
        } else {
          add_to(static_cast<T*>(gradients.v[i]) + t * a.d + c, grad);
        }
      }
    }
    __syncthreads();  // the next token writes sums again
  }
}

// Eight values of a gradient that is read and written once, so that the cache is left to the sources.
struct GradientVec {
  uint4 low, high;  // high: wide ones only
};
__device__ __forceinline__ GradientVec load_gradient(const void* row, bool wide, int at) {
  const auto* p = static_cast<const uint4*>(row) + (wide ? 2 * at : at);
  return {__ldcs(p), wide ? __ldcs(p + 1) : uint4{}};
}
__device__ __forceinline__ void add_and_store(
    void* row, bool wide, int at, GradientVec old, const float (&grad)[kOnePassVector]) {
  if (wide) {
    auto* p = static_cast<float4*>(row) + 2 * at;
    const auto low = reinterpret_cast<const float4&>(old.low),
               high = reinterpret_cast<const float4&>(old.high);
    __stcs(p, float4{low.x + grad[0], low.y + grad[1], low.z + grad[2], low.w + grad[3]});
    __stcs(p + 1, float4{high.x + grad[4], high.y + grad[5], high.z + grad[6], high.w + grad[7]});
    return;
  }
  auto& v = reinterpret_cast<RawVec&>(old.low);
#pragma unroll
  for (int j = 0; j < kOnePassVector; ++j)
    v.v[j] = round_to<__nv_bfloat16>(widen<float>(v.v[j]) + grad[j]);
  __stcs(static_cast<uint4*>(row) + at, old.low);
}

template <class W>
__global__ void __launch_bounds__(kOnePassThreads, 2)
    one_pass_kernel(Backward<__nv_bfloat16, float> a,
                    const __grid_constant__ SourcePointers<__nv_bfloat16, kOnePassSources> sources,
                    const __grid_constant__ GradientPointers<kOnePassSources> gradients,
                    const W* query,
                    const W* norm) {
  constexpr int kMaxWarps = kOnePassThreads / kWarp;
  constexpr int kTogether = 2;  // sources whose gradients are on their way at a time
  // query (.) norm, its gradient, dh of the token; each thread reads what it wrote itself
  extern __shared__ float4 planes[];
  __shared__ Sums<float> partial[kOnePassSources][kMaxWarps];
  __shared__ Coefficients<float> shared_coefficients[kOnePassSources];
  const int vectors = static_cast<int>(a.d) / kOnePassVector;
  const int lane = static_cast<int>(threadIdx.x) % kWarp,
            warp = static_cast<int>(threadIdx.x) / kWarp,
            warps = static_cast<int>(blockDim.x) / kWarp;
  float4* dom = planes + 2 * vectors;
  auto* dh = reinterpret_cast<RawVec*>(dom + 2 * vectors);
  fold_query(planes, query, norm, vectors);
  for (int at = static_cast<int>(threadIdx.x); at < vectors; at += static_cast<int>(blockDim.x))
    dom[at] = dom[vectors + at] = {0, 0, 0, 0};
  const std::int64_t first = std::int64_t{blockIdx.x} * a.tokens_per_block,
                     end = min(a.tokens, first + a.tokens_per_block);
  for (std::int64_t t = first; t < end; ++t) {
    RawVec v[kOnePassChunks];
    load_row(v, a.dh + t * a.d, vectors);
#pragma unroll
    for (int k = 0; k < kOnePassChunks; ++k) {
      const int at = static_cast<int>(threadIdx.x + k * blockDim.x);
      if (at < vectors) dh[at] = v[k];
    }
#pragma unroll 1
    for (int i = 0; i < a.n; ++i) {
      load_row(v, sources.v[i] + t * a.d, vectors);
      Sums<float> sums{0, 0, 0};
#pragma unroll
      for (int k = 0; k < kOnePassChunks; ++k) {
        const int at = static_cast<int>(threadIdx.x + k * blockDim.x);
        if (at >= vectors) continue;
        float om[kOnePassVector];
        read_planes(om, planes, vectors, at);
        const RawVec g = dh[at];
#pragma unroll
        for (int j = 0; j < kOnePassVector; ++j) {
          const float x = widen<float>(v[k].v[j]);
          sums.squares += x * x;
          sums.dot += x * om[j];
          sums.dp += x * widen<float>(g.v[j]);
        }
      }
      sums = {warp_sum(sums.squares), warp_sum(sums.dot), warp_sum(sums.dp)};
      if (lane == 0) partial[i][warp] = sums;
    }
    __syncthreads();
    if (warp == 0) {  // lane i takes source i
      Sums<float> sums{0, 0, 0};
      float weight = 0;
      if (lane < a.n) {
        weight = a.p[t * a.n + lane];
        for (int w = 0; w < warps; ++w) {
          sums.squares += partial[lane][w].squares;
          sums.dot += partial[lane][w].dot;
          sums.dp += partial[lane][w].dp;
        }
      }
      const float mean_dp = warp_sum(weight * sums.dp);  // <dh, h>
      if (lane < a.n) {
        shared_coefficients[lane] =
            coefficients(sums, weight, mean_dp, static_cast<float>(a.d), a.eps);
      }
    }
    __syncthreads();
    for (int at = static_cast<int>(threadIdx.x); at < vectors; at += static_cast<int>(blockDim.x)) {
      float om[kOnePassVector], sum[kOnePassVector];
      read_planes(om, planes, vectors, at);
      read_planes(sum, dom, vectors, at);
      const RawVec g = dh[at];
      for (int begin = 0; begin < a.n; begin += kTogether) {
        RawVec x[kTogether];
        GradientVec old[kTogether];
        void* row[kTogether];
#pragma unroll
        for (int s = 0; s < kTogether; ++s) {
          const int i = begin + s;
          if (i >= a.n) continue;
          x[s] = load<kOnePassVector>(sources.v[i] + t * a.d + at * kOnePassVector);
          row[s] = gradients.v[i] == nullptr
                       ? nullptr
                       : static_cast<char*>(gradients.v[i]) + t * a.d * (gradients.wide[i] ? 4 : 2);
          if (row[s] != nullptr) old[s] = load_gradient(row[s], gradients.wide[i], at);
        }
#pragma unroll
        for (int s = 0; s < kTogether; ++s) {
          const int i = begin + s;
          if (i >= a.n) continue;
          const auto c = shared_coefficients[i];
          float grad[kOnePassVector];
#pragma unroll
          for (int j = 0; j < kOnePassVector; ++j) {
            const float value = widen<float>(x[s].v[j]);
            sum[j] += c.ds_rho * value;
            grad[j] = c.weight * widen<float>(g.v[j]) + c.ds_rho * om[j] - c.back * value;
          }
          if (row[s] != nullptr) add_and_store(row[s], gradients.wide[i], at, old[s], grad);
        }
      }
      dom[at] = {sum[0], sum[1], sum[2], sum[3]};
      dom[vectors + at] = {sum[4], sum[5], sum[6], sum[7]};
    }
  }
  if (a.partials == nullptr) return;
  auto* out = reinterpret_cast<float4*>(a.partials + std::int64_t{blockIdx.x} * a.d);
  for (int at = static_cast<int>(threadIdx.x); at < vectors; at += static_cast<int>(blockDim.x)) {
    out[2 * at] = dom[at];
    out[2 * at + 1] = dom[vectors + at];
  }
}

// dquery += dom (.) norm, dnorm += dom (.) query.
template <class A, class W>
struct AddToBoth {
  A* dquery;
  A* dnorm;
  const W* query;
  const W* norm;
  __device__ __forceinline__ void operator()(std::int64_t c, A dom) const {
    dquery[c] += dom * widen<A>(norm[c]);
    dnorm[c] += dom * widen<A>(query[c]);
  }
};

RowBlocks token_blocks(const AttnResBackward& op) {
  return RowBlocks(op.dh.dim(0), kTokensPerBlock, kMaxBlocks);
}

// The one-pass kernel reads several gradients before it writes them.
bool all_distinct(const std::vector<TensorView>& views) {
  for (std::size_t i = 0; i < views.size(); ++i) {
    for (std::size_t j = i + 1; j < views.size(); ++j) {
      if (!views[i].empty() && views[i].data() == views[j].data()) return false;
    }
  }
  return true;
}

bool one_pass(const CudaContext& context, const AttnResBackward& op) {
  return may_specialise(context) && op.dh.dtype() == DType::bf16 &&
         fits_one_pass(op.sources, op.dh.dim(1)) && fits_one_pass(op.dsources, op.dh.dim(1)) &&
         all_aligned({op.dh.data(), op.query.data(), op.norm.data()}) && all_distinct(op.dsources);
}

template <class T, class W>
void backward(const CudaContext& context,
              const AttnResBackward& op,
              const TensorView& partials,
              bool fast) {
  using A = acc_t<T>;
  const RowBlocks blocks = token_blocks(op);
  const std::int64_t d = op.dh.dim(1);
  const auto stream = native_stream(context);
  const auto grid = static_cast<unsigned>(blocks.count);
  const auto* query = device_data<W>(op.query);
  const auto* norm = device_data<W>(op.norm);
  const Backward<device_t<T>, A> a{device_data<T>(op.dh),
                                   op.p.as<A>(),
                                   partials.as<A>(),
                                   op.dh.dim(0),
                                   d,
                                   blocks.rows_per_block,
                                   static_cast<int>(op.sources.size()),
                                   static_cast<A>(op.eps)};
  if (!fast) {
    plain_kernel<<<grid, kThreads, 0, stream>>>(a,
                                                source_pointers<T, kAttnResMaxSources>(op.sources),
                                                gradient_pointers<kAttnResMaxSources>(op),
                                                query,
                                                norm);
  } else if constexpr (std::is_same_v<T, bf16>) {
    const auto shared = static_cast<int>(d * std::int64_t{2 * sizeof(float) + sizeof(T)});
    MOESAIC_CUDA_CALL(cudaFuncSetAttribute(
        one_pass_kernel<device_t<W>>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    one_pass_kernel<<<grid, one_pass_threads(d), shared, stream>>>(
        a,
        source_pointers<T, kOnePassSources>(op.sources),
        gradient_pointers<kOnePassSources>(op),
        query,
        norm);
  }
  check_launch("kernel attn_res_backward");
  if (partials.empty()) return;
  finish_columns(context,
                 partials.as<A>(),
                 blocks.count,
                 d,
                 d,
                 AddToBoth<A, device_t<W>>{op.dquery.as<A>(), op.dnorm.as<A>(), query, norm},
                 "kernel attn_res_backward: query and norm");
}

}  // namespace

void launch(CudaContext& context, const AttnResBackward& op) {
  const bool fast = one_pass(context, op);
  report_path(context, op, fast ? "one_pass" : "plain");
  if (op.dh.numel() == 0) return;
  const Arena::Mark mark(context.scratch);
  TensorView partials;
  if (!op.dquery.empty()) {
    partials =
        context.scratch.take({token_blocks(op).count, op.dh.dim(1)}, op.p.dtype(), "attn_res.sums");
  }
  if (is_dry(context)) return;
  dispatch_float(op.dh.dtype(), [&]<class T>(TypeTag<T>) {
    dispatch_weight<T>(op.query.dtype(),
                       [&]<class W>(TypeTag<W>) { backward<T, W>(context, op, partials, fast); });
  });
}

}  // namespace moesaic
