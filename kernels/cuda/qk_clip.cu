#include "kernels/cuda/split_master.cuh"
#include "kernels/cuda/vectors.cuh"
#include "kernels/ops/qk_clip.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 256;

// A tensor of one of a few types, read where the type does not matter to speed.
struct AnyScalars {
  const void* data;
  DType dtype;
  __device__ double operator[](std::int64_t i) const {
    if (dtype == DType::i32) return static_cast<const std::int32_t*>(data)[i];
    if (dtype == DType::f32) return static_cast<double>(static_cast<const float*>(data)[i]);
    return static_cast<const double*>(data)[i];
  }
};

struct Rule {
  AnyScalars max_logit, skip;  // skip.data null: never
  double tau;
  __device__ double gamma(std::int64_t head) const {
    if (skip.data != nullptr && skip[0] != 0) return 1.0;
    const double largest = max_logit[head];
    return isfinite(largest) && largest > tau ? tau / largest : 1.0;
  }
};

// A master as it is stored.
template <class W>
struct WholeMaster {
  using Real = W;
  W* w;
  template <int N>
  __device__ __forceinline__ void scale(std::int64_t at, W factor) const {
    auto v = load<N>(w + at);
#pragma unroll
    for (int i = 0; i < N; ++i)
      v.v[i] *= factor;
    store<N>(w + at, v);
  }
};
struct SplitMaster {
  using Real = float;
  __nv_bfloat16* weight;
  std::uint16_t* remainder;
  template <int N>
  __device__ __forceinline__ void scale(std::int64_t at, float factor) const {
    auto v = load_joined<N>(weight + at, remainder + at);
#pragma unroll
    for (int i = 0; i < N; ++i)
      v.v[i] *= factor;
    store_split<N>(weight + at, remainder + at, v);
  }
};

// The rows of a head: the first `rooted` ones are scaled by sqrt(gamma), the next `full` ones by gamma, the rest stay.
template <class Master, int N>
__global__ void __launch_bounds__(kThreads) scale_kernel(Master master,
                                                         Rule rule,
                                                         std::int64_t rows,
                                                         std::int64_t columns,
                                                         std::int64_t per_head,
                                                         std::int64_t rooted,
                                                         std::int64_t full) {
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const std::int64_t in_head = row % per_head;
    if (in_head >= rooted + full) continue;
    const double gamma = rule.gamma(row / per_head);
    if (gamma == 1.0) continue;
    const auto factor = static_cast<typename Master::Real>(in_head < rooted ? sqrt(gamma) : gamma);
    for (std::int64_t c = std::int64_t{threadIdx.x} * N; c < columns; c += kThreads * N)
      master.template scale<N>(row * columns + c, factor);
  }
}

template <class G>
__global__ void __launch_bounds__(kThreads) gamma_kernel(G* gamma, Rule rule, std::int64_t heads) {
  for (std::int64_t h = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; h < heads;
       h += std::int64_t{gridDim.x} * kThreads)
    gamma[h] = static_cast<G>(rule.gamma(h));
}

// check() has refused other types than these two.
template <class F>
void dispatch_real(DType dtype, F&& f) {
  if (dtype == DType::f64) return f(TypeTag<double>{});
  f(TypeTag<float>{});
}

void scale(const CudaContext& context,
           const TensorView& weight,
           const TensorView& remainder,
           const Rule& rule,
           std::int64_t per_head,
           std::int64_t rooted,
           std::int64_t full) {
  if (weight.numel() == 0) return;
  const auto enqueue = [&]<class Master>(const Master& master) {
    with_vector<kWide<typename Master::Real>>(
        weight.dim(1),
        {weight.data(), remainder.data()},
        [&]<int N>(std::integral_constant<int, N>) {
          scale_kernel<Master, N>
              <<<grid_for(context, weight.dim(0)), kThreads, 0, native_stream(context)>>>(
                  master, rule, weight.dim(0), weight.dim(1), per_head, rooted, full);
        });
  };
  if (remainder.empty()) {
    dispatch_real(weight.dtype(),
                  [&]<class W>(TypeTag<W>) { enqueue(WholeMaster<W>{weight.as<W>()}); });
  } else {
    enqueue(SplitMaster{device_data<bf16>(weight), remainder.as<std::uint16_t>()});
  }
  check_launch("kernel qk_clip");
}

}  // namespace

void launch(CudaContext& context, const QkClip& op) {
  const std::int64_t heads = op.max_logit.dim(0);
  if (is_dry(context) || heads == 0) return;
  const Rule rule{
      {op.max_logit.data(), op.max_logit.dtype()}, {op.skip.data(), op.skip.dtype()}, op.tau};
  scale(context, op.q_weight, op.q_remainder, rule, op.dn + op.dr, op.dn, op.dr);
  scale(context, op.kv_b_weight, op.kv_b_remainder, rule, op.dn + op.dv, op.dn, 0);
  if (op.gamma.empty()) return;
  dispatch_real(op.gamma.dtype(), [&]<class G>(TypeTag<G>) {
    gamma_kernel<<<grid_for(context, (heads + kThreads - 1) / kThreads),
                   kThreads,
                   0,
                   native_stream(context)>>>(op.gamma.as<G>(), rule, heads);
  });
  check_launch("kernel qk_clip: gamma");
}

}  // namespace moesaic
