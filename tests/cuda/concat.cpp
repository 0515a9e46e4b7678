#include "kernels/ops/concat.h"

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

struct Size {
  std::int64_t rows, m, n;
};
// Units of 16, 4 and 2 bytes for bf16, an empty side, rows shorter and longer than a warp and a block.
const Size kSizes[] = {{1, 1, 1},
                       {0, 8, 8},
                       {300, 128, 64},
                       {77, 6, 2},
                       {33, 7, 129},
                       {5, 0, 16},
                       {64, 512, 64},
                       {9, 4096, 72},
                       {3, 3001, 2002}};

}  // namespace

TEST_CASE("ConcatColumns and SplitColumns on CUDA have the bits of the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    for (const auto& s : kSizes) {
      INFO(s.rows << " x (" << s.m << " + " << s.n << ") " << name(dtype));
      const Twin a({s.rows, s.m}, dtype), b({s.rows, s.n}, dtype), y({s.rows, s.m + s.n}, dtype);
      fill_normal(a.initial.view(), 1);
      fill_normal(b.initial.view(), 2);
      fill_normal(y.initial.view(), 3);
      require_cuda_matches_cpu(both, {&a, &b, &y}, {{&y, 0}}, [&](auto side) {
        return ConcatColumns{.y = side(y), .a = side(a), .b = side(b)};
      });
      require_cuda_matches_cpu(both, {&a, &b, &y}, {{&a, 0}, {&b, 0}}, [&](auto side) {
        return SplitColumns{.a = side(a), .b = side(b), .y = side(y)};
      });
    }
  }
}

TEST_CASE("ConcatColumns on CUDA handles views that are not 16-byte aligned", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  const Twin a({9, 8}, DType::bf16), b({17, 8}, DType::bf16), y({17, 16}, DType::bf16);
  fill_normal(a.initial.view(), 1);
  fill_normal(b.initial.view(), 2);
  const auto odd = [](TensorView v) {  // one element past an aligned place
    return v.reshaped({v.numel()}).rows(1, 65).reshaped({8, 8});
  };
  require_cuda_matches_cpu(both, {&a, &b, &y}, {{&y, 0}}, [&](auto side) {
    return ConcatColumns{.y = side(y).rows(0, 8), .a = odd(side(a)), .b = side(b).rows(0, 8)};
  });
}

}  // namespace moesaic::test
