#include "kernels/ops/adamw.h"

#include <cmath>

#include "kernels/cpu/split_master.h"
#include "kernels/cpu/thread_pool.h"

namespace moesaic {
namespace {

constexpr std::int64_t kGrain = 1 << 14;

template <class M>
struct Step {
  M clip, rate, decay, inv_c1, inv_c2, beta1, one_minus_beta1, beta2, one_minus_beta2, eps;

  explicit Step(const AdamW& op) {
    const auto* scalars = op.scalars.as<M>();
    const auto scalar = [scalars](StepScalar slot) { return scalars[index_of(slot)]; };
    clip = scalar(StepScalar::clip_factor);
    rate = scalar(StepScalar::learning_rate) * static_cast<M>(op.lr_scale);
    decay = scalar(StepScalar::weight_decay_scale) * static_cast<M>(op.weight_decay);
    inv_c1 = M(1) / scalar(StepScalar::bias_correction1);
    inv_c2 = M(1) / scalar(StepScalar::bias_correction2);
    beta1 = static_cast<M>(op.beta1), one_minus_beta1 = static_cast<M>(1 - op.beta1);
    beta2 = static_cast<M>(op.beta2), one_minus_beta2 = static_cast<M>(1 - op.beta2);
    eps = static_cast<M>(op.eps);
  }
};

// Not inlined: one copy of the machine code serves both forms of a master, which must get the same bits.
template <class M, class G>
[[gnu::noinline]] void update_range(const Step<M>& s,
                                    M* __restrict__ w,
                                    M* __restrict__ m,
                                    M* __restrict__ v,
                                    const G* __restrict__ dw,
                                    std::int64_t n) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    const M g = s.clip * static_cast<M>(dw[i]);
    m[i] = s.beta1 * m[i] + s.one_minus_beta1 * g;
    v[i] = s.beta2 * v[i] + s.one_minus_beta2 * g * g;
    w[i] -= s.rate * (m[i] * s.inv_c1 / (std::sqrt(v[i] * s.inv_c2) + s.eps) + s.decay * w[i]);
  }
}

template <class M>
bool skips(const AdamW& op) {
  return op.scalars.as<M>()[index_of(StepScalar::skip)] != M(0);
}

template <class M, class G, class C>
void update(ThreadPool& pool, const AdamW& op) {
  if (skips<M>(op)) return;
  const Step<M> step(op);
  auto* w = op.w.as<M>();
  auto* m = op.m.as<M>();
  auto* v = op.v.as<M>();
  auto* copy = op.w_compute.as<C>();
  const auto* dw = op.dw.as<G>();
  pool.parallel_for(op.w.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    update_range(step, w + begin, m + begin, v + begin, dw + begin, end - begin);
    if (copy == nullptr) return;
    for (std::int64_t i = begin; i < end; ++i)
      copy[i] = C(w[i]);
  });
}

template <class G>
void update_split(ThreadPool& pool, const AdamW& op) {
  if (skips<float>(op)) return;
  const Step<float> step(op);
  auto* weight = op.w_compute.as<bf16>();
  auto* remainder = op.remainder.as<std::uint16_t>();
  auto* m = op.m.as<float>();
  auto* v = op.v.as<float>();
  const auto* dw = op.dw.as<G>();
  pool.parallel_for(op.m.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    cpu::update_split(
        weight, remainder, begin, end, [&](std::int64_t at, float* w, std::int64_t n) {
          update_range(step, w, m + at, v + at, dw + at, n);
        });
  });
}

}  // namespace

void launch(CpuContext& context, const AdamW& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    if (op.is_split()) {
      return op.dw.dtype() == DType::bf16 ? update_split<bf16>(pool, op)
                                          : update_split<float>(pool, op);
    }
    if (op.w.dtype() == DType::f64) return update<double, double, double>(pool, op);
    const bool bf16_grad = op.dw.dtype() == DType::bf16,
               bf16_copy = op.w_compute.dtype() == DType::bf16;
    if (bf16_grad)
      return bf16_copy ? update<float, bf16, bf16>(pool, op) : update<float, bf16, float>(pool, op);
    return bf16_copy ? update<float, float, bf16>(pool, op) : update<float, float, float>(pool, op);
  });
}

}  // namespace moesaic
