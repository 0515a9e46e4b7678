#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/split_master.cuh"
#include "kernels/ops/adamw.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 256;
constexpr int kVector = 4;

template <class M>
struct Constants {
  M lr_scale, weight_decay, beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
};
template <class M>
struct Step {
  M clip, rate, decay, inv_c1, inv_c2;
};

template <class M>
__device__ __forceinline__ void update(
    M& w, M& m, M& v, M dw, const Step<M>& s, const Constants<M>& c) {
  const M g = s.clip * dw;
  m = c.beta1 * m + c.one_minus_beta1 * g;
  v = c.beta2 * v + c.one_minus_beta2 * g * g;
  w -= s.rate * (m * s.inv_c1 / (sqrt(v * s.inv_c2) + c.eps) + s.decay * w);
}

// N elements per access; `n` is a multiple of N. A split master is `copy` and `remainder`, and `w` is null.
template <class M, class G, class C, int N, bool kSplit>
__global__ void __launch_bounds__(kThreads) update_kernel(M* __restrict__ w,
                                                          M* __restrict__ m,
                                                          M* __restrict__ v,
                                                          C* __restrict__ copy,
                                                          std::uint16_t* __restrict__ remainder,
                                                          const G* __restrict__ dw,
                                                          const M* __restrict__ scalars,
                                                          std::int64_t n,
                                                          Constants<M> c) {
  if (scalars[index_of(StepScalar::skip)] != M(0)) return;
  const Step<M> s{scalars[index_of(StepScalar::clip_factor)],
                  scalars[index_of(StepScalar::learning_rate)] * c.lr_scale,
                  scalars[index_of(StepScalar::weight_decay_scale)] * c.weight_decay,
                  M(1) / scalars[index_of(StepScalar::bias_correction1)],
                  M(1) / scalars[index_of(StepScalar::bias_correction2)]};
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads * N;
  for (std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * N; i < n;
       i += stride) {
    Vec<M, N> wv;
    if constexpr (kSplit) {
      wv = load_joined<N>(copy + i, remainder + i);
    } else {
      wv = load<N>(w + i);
    }
    auto mv = load<N>(m + i);
    auto vv = load<N>(v + i);
    const auto g = load<N>(dw + i);
#pragma unroll
    for (int j = 0; j < N; ++j)
      update(wv.v[j], mv.v[j], vv.v[j], widen<M>(g.v[j]), s, c);
    store<N>(m + i, mv);
    store<N>(v + i, vv);
    if constexpr (kSplit) {
      store_split<N>(copy + i, remainder + i, wv);
    } else {
      store<N>(w + i, wv);
      if (copy == nullptr) continue;
      Vec<C, N> rounded;
#pragma unroll
      for (int j = 0; j < N; ++j)
        rounded.v[j] = round_to<C>(wv.v[j]);
      store<N>(copy + i, rounded);
    }
  }
}

template <class M, class G, class C, bool kSplit = false>
void enqueue(CudaContext& context, const AdamW& op) {
  auto* w = op.w.as<M>();
  auto* m = op.m.as<M>();
  auto* v = op.v.as<M>();
  auto* copy = reinterpret_cast<device_t<C>*>(op.w_compute.as<C>());
  auto* remainder = op.remainder.as<std::uint16_t>();
  const auto* dw = reinterpret_cast<const device_t<G>*>(op.dw.as<G>());
  const auto* scalars = op.scalars.as<M>();
  const Constants<M> c{static_cast<M>(op.lr_scale),
                       static_cast<M>(op.weight_decay),
                       static_cast<M>(op.beta1),
                       static_cast<M>(1 - op.beta1),
                       static_cast<M>(op.beta2),
                       static_cast<M>(1 - op.beta2),
                       static_cast<M>(op.eps)};
  const auto stream = native_stream(context);
  const std::int64_t n = op.m.numel();
  const bool wide = is_aligned(w, 16) && is_aligned(m, 16) && is_aligned(v, 16) &&
                    is_aligned(dw, 16) && is_aligned(copy, 16) && is_aligned(remainder, 16);
  const std::int64_t body = wide ? n / kVector * kVector : 0;
  const auto blocks = [&](std::int64_t items) {
    return grid_for(context, (items + kThreads - 1) / kThreads);
  };
  if (body > 0) {
    update_kernel<M, device_t<G>, device_t<C>, kVector, kSplit>
        <<<blocks(body / kVector), kThreads, 0, stream>>>(
            w, m, v, copy, remainder, dw, scalars, body, c);
  }
  if (n > body) {
    update_kernel<M, device_t<G>, device_t<C>, 1, kSplit>
        <<<blocks(n - body), kThreads, 0, stream>>>(kSplit ? nullptr : w + body,
                                                    m + body,
                                                    v + body,
                                                    copy == nullptr ? nullptr : copy + body,
                                                    kSplit ? remainder + body : nullptr,
                                                    dw + body,
                                                    scalars,
                                                    n - body,
                                                    c);
  }
  check_launch("kernel adamw");
}

}  // namespace

void launch(CudaContext& context, const AdamW& op) {
  if (is_dry(context) || op.m.numel() == 0) return;
  if (op.is_split()) {
    return op.dw.dtype() == DType::bf16 ? enqueue<float, bf16, bf16, true>(context, op)
                                        : enqueue<float, float, bf16, true>(context, op);
  }
  if (op.w.dtype() == DType::f64) return enqueue<double, double, double>(context, op);
  const bool bf16_grad = op.dw.dtype() == DType::bf16,
             bf16_copy = op.w_compute.dtype() == DType::bf16;
  if (bf16_grad)
    return bf16_copy ? enqueue<float, bf16, bf16>(context, op)
                     : enqueue<float, bf16, float>(context, op);
  return bf16_copy ? enqueue<float, float, bf16>(context, op)
                   : enqueue<float, float, float>(context, op);
}

}  // namespace moesaic
