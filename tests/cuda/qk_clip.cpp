#include "kernels/ops/qk_clip.h"

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

struct Size {
  std::int64_t heads, in, ckv, dn, dr, dv;
};
const Size kSizes[] = {
    {1, 1, 1, 1, 1, 1}, {4, 64, 40, 16, 8, 16}, {7, 33, 129, 5, 0, 3}, {96, 48, 16, 12, 4, 12}};

}  // namespace

// Factors are formed in double on both sides, and each weight is multiplied once: the CPU's bits.
TEST_CASE("QK-clip on CUDA has the bits of the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& s : kSizes) {
    for (const DType weights : {DType::f64, DType::f32}) {
      for (const DType logits : {DType::f64, DType::f32}) {
        for (int skip_value = -1; skip_value <= 1; ++skip_value) {  // -1: no flag
          INFO(s.heads << " heads of " << s.dn << " + " << s.dr << ", " << s.dv << ", "
                       << name(weights) << ", logits " << name(logits) << ", skip " << skip_value);
          const Twin q({s.heads * (s.dn + s.dr), s.in}, weights),
              kv({s.heads * (s.dn + s.dv), s.ckv}, weights), gamma({s.heads}, logits),
              largest({s.heads}, logits), skip({1}, DType::f32);
          fill_normal(q.initial.view(), 1);
          fill_normal(kv.initial.view(), 2);
          fill_normal(largest.initial.view(), 3, 60.0, 100.0);
          dispatch_float(logits, [&]<class T>(TypeTag<T>) {
            if (s.heads > 3) {
              largest.initial.data<T>()[1] = T(INFINITY);
              largest.initial.data<T>()[2] = T(NAN);
              largest.initial.data<T>()[3] = T(100.0);
            }
          });
          skip.initial.data<float>()[0] = static_cast<float>(skip_value);
          require_cuda_matches_cpu(both,
                                   {&q, &kv, &gamma, &largest, &skip},
                                   {{&q, 0}, {&kv, 0}, {&gamma, 0}},
                                   [&](auto side) {
                                     return QkClip{
                                         .q_weight = side(q),
                                         .kv_b_weight = side(kv),
                                         .gamma = side(gamma),
                                         .max_logit = side(largest),
                                         .skip = skip_value < 0 ? TensorView() : side(skip),
                                         .dn = s.dn,
                                         .dr = s.dr,
                                         .dv = s.dv,
                                         .tau = 100.0};
                                   });
        }
      }
    }
  }
}

}  // namespace moesaic::test
