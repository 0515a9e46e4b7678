#include "kernels/ops/rope.h"

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

// Angles are formed in double on both sides and rounded once; then two products and a sum.
double tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-12 : dtype == DType::f32 ? 1e-6 : 1e-3;
}

struct Size {
  std::int64_t tokens, heads, width, begin, rotary;
};
// Many and few heads, a part of the columns, places without 16-byte (or even pair) alignment, the largest rotary width.
const Size kSizes[] = {{1, 1, 2, 0, 2},
                       {0, 4, 64, 0, 64},
                       {33, 16, 192, 128, 64},
                       {300, 1, 64, 0, 64},
                       {5, 96, 192, 128, 64},
                       {17, 3, 75, 7, 62},
                       {40, 2, 36, 4, 12},
                       {3, 2, 1040, 16, 1024},
                       {9, 5, 128, 64, 0},
                       {2000, 1, 128, 0, 64}};

}  // namespace

TEST_CASE("Rope on CUDA matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& s : kSizes) {
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
      for (int form = 0; form < 4; ++form) {
        const bool interleaved = (form & 1) != 0, inverse = (form & 2) != 0;
        INFO(s.tokens << " x " << s.heads << " x " << s.width << ", columns " << s.begin << " + "
                      << s.rotary << " " << name(dtype) << ", interleaved " << interleaved
                      << ", inverse " << inverse);
        const Twin x({s.tokens, s.heads, s.width}, dtype), positions({s.tokens}, DType::i32);
        fill_normal(x.initial.view(), 1);
        for (std::int64_t t = 0; t < s.tokens; ++t)
          positions.initial.data<std::int32_t>()[t] = static_cast<std::int32_t>(t * 7919 % 1000003);
        require_cuda_matches_cpu(both, {&x, &positions}, {{&x, tolerance(dtype)}}, [&](auto side) {
          return Rope{.x = side(x),
                      .positions = side(positions),
                      .begin = s.begin,
                      .rotary_width = s.rotary,
                      .theta = 50000.0,
                      .interleaved = interleaved,
                      .inverse = inverse};
        });
      }
    }
  }
}

}  // namespace moesaic::test
