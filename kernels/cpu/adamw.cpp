#include "kernels/ops/adamw.h"

#include <cmath>

#include "kernels/cpu/thread_pool.h"

namespace moesaic {
namespace {

constexpr std::int64_t kGrain = 1 << 14;

template <class M, class G, class C>
void update(ThreadPool& pool, const AdamW& op) {
  const auto* scalars = op.scalars.as<M>();
  const auto scalar = [scalars](StepScalar slot) { return scalars[index_of(slot)]; };
  if (scalar(StepScalar::skip) != M(0)) return;
  const M clip = scalar(StepScalar::clip_factor);
  const M rate = scalar(StepScalar::learning_rate) * static_cast<M>(op.lr_scale);
  const M decay = scalar(StepScalar::weight_decay_scale) * static_cast<M>(op.weight_decay);
  const M inv_c1 = M(1) / scalar(StepScalar::bias_correction1),
          inv_c2 = M(1) / scalar(StepScalar::bias_correction2);
  const auto beta1 = static_cast<M>(op.beta1), one_minus_beta1 = static_cast<M>(1 - op.beta1);
  const auto beta2 = static_cast<M>(op.beta2), one_minus_beta2 = static_cast<M>(1 - op.beta2);
  const auto eps = static_cast<M>(op.eps);
  auto* w = op.w.as<M>();
  auto* m = op.m.as<M>();
  auto* v = op.v.as<M>();
  auto* copy = op.w_compute.as<C>();
  const auto* dw = op.dw.as<G>();
  pool.parallel_for(op.w.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
#pragma omp simd
    for (std::int64_t i = begin; i < end; ++i) {
      const M g = clip * static_cast<M>(dw[i]);
      m[i] = beta1 * m[i] + one_minus_beta1 * g;
      v[i] = beta2 * v[i] + one_minus_beta2 * g * g;
      w[i] -= rate * (m[i] * inv_c1 / (std::sqrt(v[i] * inv_c2) + eps) + decay * w[i]);
    }
    if (copy == nullptr) return;
    for (std::int64_t i = begin; i < end; ++i)
      copy[i] = C(w[i]);
  });
}

}  // namespace

void launch(CpuContext& context, const AdamW& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    if (op.w.dtype() == DType::f64) return update<double, double, double>(pool, op);
    const bool bf16_grad = op.dw.dtype() == DType::bf16,
               bf16_copy = op.w_compute.dtype() == DType::bf16;
    if (bf16_grad)
      return bf16_copy ? update<float, bf16, bf16>(pool, op) : update<float, bf16, float>(pool, op);
    return bf16_copy ? update<float, float, bf16>(pool, op) : update<float, float, float>(pool, op);
  });
}

}  // namespace moesaic
