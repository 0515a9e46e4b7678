#include "tests/cuda/kda_support.h"

namespace moesaic::test {
namespace {

// States are products and sums of a few numbers in the accumulation type; o and the sum before it are over K terms.
double tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-13 : dtype == DType::f32 ? 5e-6 : 1e-3;
}

void check(BothBackends& both,
           std::int64_t sequences,
           std::int64_t heads,
           std::int64_t K,
           std::int64_t V,
           DType dtype,
           KdaGates gates,
           bool in_place) {
  INFO(sequences << " x " << heads << " x " << K << " x " << V << " " << name(dtype) << ", gates "
                 << static_cast<int>(gates) << ", in place " << in_place);
  // A token per sequence: tokens are documents here.
  std::vector<std::int32_t> cu(static_cast<std::size_t>(sequences) + 1);
  for (std::size_t i = 0; i < cu.size(); ++i)
    cu[i] = static_cast<std::int32_t>(i);
  const KdaTwins t({cu, heads, K, V, 16, dtype, true, false, gates});
  const Twin& s_out = in_place ? t.s0 : t.s_final;
  require_cuda_matches_cpu(both,
                           t.all(),
                           {{&t.o, tolerance(dtype)}, {&s_out, dtype == DType::f64 ? 1e-13 : 5e-6}},
                           [&](auto side) {
                             return KdaStep{.o = side(t.o),
                                            .s_out = side(s_out),
                                            .q = side(t.q),
                                            .k = side(t.k),
                                            .v = side(t.v),
                                            .g = side(t.g),
                                            .beta = side(t.beta),
                                            .s_in = side(t.s0)};
                           });
}

}  // namespace

TEST_CASE("KDA step on CUDA matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  // Value heads that are and are not a multiple of an access, key heads beyond the 128 rows kept in registers.
  const std::int64_t sizes[][4] = {{1, 1, 1, 1},
                                   {3, 2, 7, 5},
                                   {2, 3, 64, 64},
                                   {5, 4, 128, 128},
                                   {2, 1, 129, 36},
                                   {1, 2, 300, 131}};
  int flags = 0;
  for (const auto& s : sizes) {
    for (const auto dtype : {DType::f64, DType::f32, DType::bf16}) {
      for (const auto gates : {KdaGates::bounded, KdaGates::extreme}) {
        ++flags;
        check(both, s[0], s[1], s[2], s[3], dtype, gates, flags % 3 == 0);
      }
    }
  }
}

}  // namespace moesaic::test
