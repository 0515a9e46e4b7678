#include "kernels/ops/kda_segment.h"

#include "tests/cuda/kda_support.h"

namespace moesaic::test {
namespace {

// Both backends walk the same recurrence; the exponential and the order of the sums over K differ.
double tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-12 : 2e-5;
}

void check(BothBackends& both,
           const std::vector<std::int32_t>& cu,
           std::int64_t heads,
           std::int64_t K,
           std::int64_t V,
           DType dtype,
           KdaGates gates) {
  INFO(cu.size() - 1 << " documents, " << cu.back() << " tokens, " << heads << " x " << K << " x "
                     << V << " " << name(dtype) << ", gates " << static_cast<int>(gates));
  const KdaTwins t({cu, heads, K, V, 16, dtype, true, false, gates});
  const Twin m({heads, K, K}, kda_wide(dtype)), e({heads, K, V}, kda_wide(dtype)),
      f({heads, K, V}, kda_wide(dtype));
  for (const Twin* twin : {&m, &e, &f})
    fill_poison(twin->initial.view());
  require_cuda_matches_cpu(both,
                           {&m, &e, &t.k, &t.v, &t.g, &t.beta, &t.cu},
                           {{&m, tolerance(dtype)}, {&e, tolerance(dtype)}},
                           [&](auto side) {
                             return KdaSegmentMap{.m = side(m),
                                                  .e = side(e),
                                                  .k = side(t.k),
                                                  .v = side(t.v),
                                                  .g = side(t.g),
                                                  .beta = side(t.beta),
                                                  .cu_seqlens = side(t.cu)};
                           });
  require_cuda_matches_cpu(both,
                           {&f, &t.d_o, &t.q, &t.k, &t.g, &t.beta, &t.cu},
                           {{&f, tolerance(dtype)}},
                           [&](auto side) {
                             return KdaSegmentGradient{.f = side(f),
                                                       .d_o = side(t.d_o),
                                                       .q = side(t.q),
                                                       .k = side(t.k),
                                                       .g = side(t.g),
                                                       .beta = side(t.beta),
                                                       .cu_seqlens = side(t.cu)};
                           });
}

}  // namespace

TEST_CASE("KDA state maps on CUDA match the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  const std::vector<std::vector<std::int32_t>> documents = {{0, 1}, {0, 37}, {0, 5, 5, 40, 41}};
  for (const auto& cu : documents) {
    for (const auto dtype : {DType::f64, DType::f32, DType::bf16}) {
      for (const auto gates : {KdaGates::bounded, KdaGates::extreme}) {
        check(both, cu, 2, 7, 5, dtype, gates);
        check(both, cu, 3, 128, 128, dtype, gates);
        check(both, cu, 1, 300, 33, dtype, gates);
      }
    }
  }
}

TEST_CASE("KDA chains of state maps on CUDA match the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const std::int64_t pieces : {1, 2, 3, 8}) {
    for (const auto dtype : {DType::f64, DType::f32}) {
      for (const bool reversed : {false, true}) {
        const std::int64_t heads = 2, K = 37, V = 66;
        INFO(pieces << " pieces " << name(dtype) << " reversed " << reversed);
        const Twin m({pieces, heads, K, K}, dtype), e({pieces, heads, K, V}, dtype),
            state({heads, K, V}, dtype);
        fill_normal(m.initial.view(), 1, 0.15);
        fill_normal(e.initial.view(), 2);
        fill_poison(state.initial.view());
        require_cuda_matches_cpu(
            both, {&m, &e, &state}, {{&state, tolerance(dtype)}}, [&](auto side) {
              return KdaSegmentChain{
                  .state = side(state), .m = side(m), .e = side(e), .reversed = reversed};
            });
      }
    }
  }
}

}  // namespace moesaic::test
