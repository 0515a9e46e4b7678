#include "kernels/ops/rms_norm.h"

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

DType stats_type(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}
// Both sides round to the same type at the same places; what differs is the order of sums (the
// CPU's f32 sum of a long row is the worse one).
double elementwise_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-13 : dtype == DType::f32 ? 1e-5 : 1e-3;
}
double sum_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-13 : 1e-5;
}

void check_forward(
    BothBackends& both, std::int64_t rows, std::int64_t hidden, DType dtype, DType weight_dtype) {
  INFO(rows << " x " << hidden << " " << name(dtype) << ", weight " << name(weight_dtype));
  const Twin x({rows, hidden}, dtype), weight({hidden}, weight_dtype), y({rows, hidden}, dtype),
      inv_rms({rows}, stats_type(dtype));
  fill_normal(x.initial.view(), 1, 3.0);
  fill_normal(weight.initial.view(), 2, 0.2, 1.0);
  fill_normal(y.initial.view(), 3);
  require_cuda_matches_cpu(
      both,
      {&x, &weight, &y, &inv_rms},
      {{&y, elementwise_tolerance(dtype)}, {&inv_rms, sum_tolerance(dtype)}},
      [&](auto side) {
        return RmsNormForward{
            .y = side(y), .inv_rms = side(inv_rms), .x = side(x), .weight = side(weight)};
      });
}

void check_backward(BothBackends& both,
                    std::int64_t rows,
                    std::int64_t hidden,
                    DType dtype,
                    DType weight_dtype,
                    bool accumulate,
                    bool in_place,
                    bool frozen) {
  INFO(rows << " x " << hidden << " " << name(dtype) << ", weight " << name(weight_dtype)
            << ", accumulate " << accumulate << ", in place " << in_place << ", frozen " << frozen);
  const DType stats = stats_type(dtype);
  const Twin x({rows, hidden}, dtype), dy({rows, hidden}, dtype), dx({rows, hidden}, dtype),
      weight({hidden}, weight_dtype), dweight({hidden}, stats), inv_rms({rows}, stats);
  fill_normal(x.initial.view(), 1, 3.0);
  fill_normal(dy.initial.view(), 2);
  fill_normal(dx.initial.view(), 3);
  fill_normal(weight.initial.view(), 4, 0.2, 1.0);
  fill_normal(dweight.initial.view(), 5);
  fill_normal(inv_rms.initial.view(), 6, 0.02, 0.33);
  const Twin& result = in_place ? dy : dx;
  require_cuda_matches_cpu(
      both,
      {&x, &dy, &dx, &weight, &dweight, &inv_rms},
      {{&result, elementwise_tolerance(dtype)}, {&dweight, frozen ? 0 : sum_tolerance(dtype)}},
      [&](auto side) {
        return RmsNormBackward{.dx = side(result),
                               .dweight = frozen ? TensorView() : side(dweight),
                               .dy = side(dy),
                               .x = side(x),
                               .weight = side(weight),
                               .inv_rms = side(inv_rms),
                               .accumulate_dx = accumulate};
      });
}

struct Size {
  std::int64_t rows, hidden;
};
// One row, odd lengths (no vector access), lengths on both sides of the block-per-row limit, many
// short rows, and more rows than the 512 x 64 that the weight gradient takes in blocks of 64.
const Size kSizes[] = {{1, 1},
                       {1, 128},
                       {3, 7},
                       {65, 129},
                       {200, 1023},
                       {64, 1024},
                       {130, 2056},
                       {257, 7168},
                       {40000, 72},
                       {5, 16385}};

}  // namespace

TEST_CASE("RMSNorm forward on CUDA matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& s : kSizes) {
    check_forward(both, s.rows, s.hidden, DType::f64, DType::f64);
    check_forward(both, s.rows, s.hidden, DType::f32, DType::f32);
    check_forward(both, s.rows, s.hidden, DType::bf16, DType::bf16);
    check_forward(both, s.rows, s.hidden, DType::bf16, DType::f32);
  }
}

TEST_CASE("RMSNorm backward on CUDA matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& s : kSizes) {
    check_backward(both, s.rows, s.hidden, DType::f64, DType::f64, false, false, false);
    check_backward(both, s.rows, s.hidden, DType::f32, DType::f32, true, false, false);
    check_backward(both, s.rows, s.hidden, DType::bf16, DType::f32, false, true, false);
    check_backward(both, s.rows, s.hidden, DType::bf16, DType::bf16, true, false, true);
  }
}

TEST_CASE("RMSNorm on CUDA handles views that are not 16-byte aligned", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  const Twin x({66, 2}, DType::bf16), y({66, 2}, DType::bf16), weight({128}, DType::bf16),
      inv_rms({1}, DType::f32);
  fill_normal(x.initial.view(), 1);
  fill_normal(weight.initial.view(), 2);
  const auto shifted = [](TensorView v) {
    return v.rows(1, 65).reshaped({1, 128});
  };  // 4 bytes past the start
  require_cuda_matches_cpu(both, {&x, &y, &weight, &inv_rms}, {{&y, 1e-3}}, [&](auto side) {
    return RmsNormForward{.y = shifted(side(y)),
                          .inv_rms = side(inv_rms),
                          .x = shifted(side(x)),
                          .weight = side(weight)};
  });
}

}  // namespace moesaic::test
