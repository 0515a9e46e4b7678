#include "kernels/ops/gemm.h"

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

struct Case {
  std::int64_t m, n, k;
  DType input, output;
  bool transpose_a = false, transpose_b = false, accumulate = false;
  double alpha = 1.0;
};

// Products of bf16 are exact in f32, so with an f32 result only the order of the sum and the tensor
// cores' truncation of partial sums differ.
double tolerance(const Case& c) {
  if (c.input == DType::f64) return 1e-13;
  if (c.input == DType::f32) return 1e-5;
  return c.output == DType::bf16 ? 3e-3 : 1e-4;
}

void check(BothBackends& both, const Case& c) {
  INFO(c.m << " x " << c.n << " x " << c.k << " " << name(c.input) << " to " << name(c.output)
           << " ta " << c.transpose_a << " tb " << c.transpose_b << " accumulate " << c.accumulate
           << " alpha " << c.alpha);
  const Twin a(c.transpose_a ? Shape{c.k, c.m} : Shape{c.m, c.k}, c.input),
      b(c.transpose_b ? Shape{c.n, c.k} : Shape{c.k, c.n}, c.input), out({c.m, c.n}, c.output);
  fill_normal(a.initial.view(), 1);
  fill_normal(b.initial.view(), 2);
  fill_normal(out.initial.view(), 3, 10.0);
  require_cuda_matches_cpu(both, {&a, &b, &out}, {{&out, tolerance(c)}}, [&](auto side) {
    return Gemm{.c = side(out),
                .a = side(a),
                .b = side(b),
                .transpose_a = c.transpose_a,
                .transpose_b = c.transpose_b,
                .accumulate = c.accumulate,
                .alpha = c.alpha};
  });
}

}  // namespace

TEST_CASE("Gemm on CUDA matches the CPU for all transposes, dtypes and tails", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  const DType types[][2] = {{DType::f64, DType::f64},
                            {DType::f32, DType::f32},
                            {DType::bf16, DType::bf16},
                            {DType::bf16, DType::f32}};
  const std::int64_t sizes[][3] = {
      {1, 1, 1}, {1, 896, 256}, {64, 64, 64}, {65, 33, 129}, {37, 200, 1000}, {256, 8, 512}};
  for (const auto& type : types) {
    for (const auto& size : sizes) {
      for (int flags = 0; flags < 8; ++flags) {
        check(both,
              {size[0],
               size[1],
               size[2],
               type[0],
               type[1],
               (flags & 1) != 0,
               (flags & 2) != 0,
               (flags & 4) != 0,
               flags == 5 ? 0.25 : 1.0});
      }
    }
  }
}

TEST_CASE("Gemm on CUDA: long sums stay plain f32 and equal bits run after run", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  // Few outputs and a long k are what tempts a library to split the sum. TF32 would miss 1e-5 by
  // more than an order.
  check(both, {64, 96, 16384, DType::f32, DType::f32, true, false, true});
  check(both, {64, 96, 16384, DType::bf16, DType::f32, true, false, true});
  // Few tiles: the parts of the sums are added by a second kernel, in order.
  check(both, {16, 512, 8192, DType::bf16, DType::f32, true, false, true});
  check(both, {200, 130, 4104, DType::bf16, DType::f32, true, false, true, 0.25});
  check(both, {130, 200, 5000, DType::f32, DType::f32, true, false, false});
  check(both, {1024, 1536, 768, DType::f32, DType::f32, false, true});
  check(both, {1024, 1536, 768, DType::bf16, DType::bf16, false, true});
}

TEST_CASE("Gemm on CUDA: an empty sum is zero, or leaves what is accumulated", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  auto& stream = both.cuda.stream();
  const Twin out({3, 5}, DType::f32);
  fill_normal(out.initial.view(), 1);
  const TensorView a(out.device.view().data(), DType::f32, {3, 0}, kCuda),
      b(out.device.view().data(), DType::f32, {0, 5}, kCuda);
  out.reset(stream);
  run(both.cuda.backend(), Gemm{.c = out.device.view(), .a = a, .b = b, .accumulate = true});
  CHECK(same_bits(download(out.device.view(), stream).view(), out.initial.view()));
  run(both.cuda.backend(), Gemm{.c = out.device.view(), .a = a, .b = b});
  CHECK(same_bits(download(out.device.view(), stream).view(),
                  OwnedTensor({3, 5}, DType::f32).view()));
}

}  // namespace moesaic::test
