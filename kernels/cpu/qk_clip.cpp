#include "kernels/ops/qk_clip.h"

#include <cmath>

#include "kernels/cpu/split_master.h"
#include "kernels/cpu/thread_pool.h"

namespace moesaic {
namespace {

double scalar(const ConstTensorView& v, std::int64_t i = 0) {
  switch (v.dtype()) {
    case DType::i32:
      return v.as<std::int32_t>()[i];
    case DType::f32:
      return static_cast<double>(v.as<float>()[i]);
    default:
      return v.as<double>()[i];
  }
}

void scale_rows(
    TensorView weight, TensorView remainder, std::int64_t begin, std::int64_t end, double factor) {
  if (!remainder.empty()) {
    cpu::update_split(weight.as<bf16>(),
                      remainder.as<std::uint16_t>(),
                      begin * weight.dim(1),
                      end * weight.dim(1),
                      [&](std::int64_t, float* w, std::int64_t n) {
                        for (std::int64_t i = 0; i < n; ++i)
                          w[i] *= static_cast<float>(factor);
                      });
    return;
  }
  dispatch_float(weight.dtype(), [&]<class W>(TypeTag<W>) {
    W* w = weight.as<W>();
    for (std::int64_t i = begin * weight.dim(1); i < end * weight.dim(1); ++i)
      w[i] = W(static_cast<acc_t<W>>(w[i]) * static_cast<acc_t<W>>(factor));
  });
}

void clip_head(const QkClip& op, std::int64_t h, bool skipped) {
  const double largest = scalar(op.max_logit, h);
  const double gamma =
      !skipped && std::isfinite(largest) && largest > op.tau ? op.tau / largest : 1.0;
  if (!op.gamma.empty()) {
    dispatch_float(op.gamma.dtype(), [&]<class G>(TypeTag<G>) {
      op.gamma.as<G>()[h] = G(static_cast<acc_t<G>>(gamma));
    });
  }
  if (gamma == 1.0) return;
  const std::int64_t q = h * (op.dn + op.dr), k = h * (op.dn + op.dv);
  scale_rows(op.q_weight, op.q_remainder, q, q + op.dn, std::sqrt(gamma));
  scale_rows(op.q_weight, op.q_remainder, q + op.dn, q + op.dn + op.dr, gamma);
  scale_rows(op.kv_b_weight, op.kv_b_remainder, k, k + op.dn, std::sqrt(gamma));
}

}  // namespace

void launch(CpuContext& context, const QkClip& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    const bool skipped = !op.skip.empty() && scalar(op.skip) != 0;
    pool.parallel_for(op.max_logit.dim(0), 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t h = begin; h < end; ++h)
        clip_head(op, h, skipped);
    });
  });
}

}  // namespace moesaic
