#include "kernels/ops/layer_norm.h"

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

DType acc_type(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}
// Both sides round once, at the end; what differs is the order of sums.
double elementwise_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-12 : dtype == DType::f32 ? 1e-5 : 1e-3;
}
double sum_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-12 : 1e-5;
}

struct Size {
  std::int64_t rows, width;
};
const Size kSizes[] = {
    {1, 1}, {0, 8}, {3, 7}, {65, 128}, {200, 64}, {64, 1024}, {31, 1023}, {33, 7168}, {40000, 16}};

void check_layer_norm(
    BothBackends& both, const Size& s, DType dtype, DType weight_dtype, double mean) {
  INFO(s.rows << " x " << s.width << " " << name(dtype) << ", weight " << name(weight_dtype)
              << ", mean " << mean);
  const Shape shape{s.rows, s.width};
  const DType acc = acc_type(dtype);
  const Twin x(shape, dtype), y(shape, dtype), dy(shape, dtype), dx(shape, dtype),
      weight({s.width}, weight_dtype), bias({s.width}, weight_dtype), means({s.rows}, acc),
      inv_std({s.rows}, acc), dweight({s.width}, acc), dbias({s.width}, acc);
  fill_normal(x.initial.view(), 1, 3.0, mean);
  fill_normal(weight.initial.view(), 2, 0.2, 1.0);
  fill_normal(bias.initial.view(), 3);
  fill_normal(dy.initial.view(), 4);
  fill_normal(means.initial.view(), 5, 0.02, mean);
  fill_normal(inv_std.initial.view(), 6, 0.02, 0.33);
  fill_normal(dweight.initial.view(), 7);
  fill_normal(dbias.initial.view(), 8);
  for (const Twin* out : {&y, &x}) {
    // A row of one value has no spread: y is its bias, and inv_std depends on the rounding of the mean alone.
    const double tolerance = elementwise_tolerance(dtype);
    require_cuda_matches_cpu(
        both,
        {&x, &y, &weight, &bias, &means, &inv_std},
        {{out, tolerance}, {&means, sum_tolerance(dtype)}, {&inv_std, sum_tolerance(dtype)}},
        [&](auto side) {
          return LayerNormForward{.y = side(*out),
                                  .mean = side(means),
                                  .inv_std = side(inv_std),
                                  .x = side(x),
                                  .weight = side(weight),
                                  .bias = side(bias)};
        });
  }
  for (int frozen = 0; frozen < 4; ++frozen) {  // bit 0: weight, bit 1: bias
    const bool weight_frozen = (frozen & 1) != 0, bias_frozen = (frozen & 2) != 0;
    const Twin& out = weight_frozen ? dy : dx;
    require_cuda_matches_cpu(both,
                             {&x, &dy, &dx, &weight, &means, &inv_std, &dweight, &dbias},
                             {{&out, elementwise_tolerance(dtype)},
                              {&dweight, weight_frozen ? 0 : sum_tolerance(dtype)},
                              {&dbias, bias_frozen ? 0 : sum_tolerance(dtype)}},
                             [&](auto side) {
                               return LayerNormBackward{
                                   .dx = side(out),
                                   .dweight = weight_frozen ? TensorView() : side(dweight),
                                   .dbias = bias_frozen ? TensorView() : side(dbias),
                                   .dy = side(dy),
                                   .x = side(x),
                                   .weight = side(weight),
                                   .mean = side(means),
                                   .inv_std = side(inv_std)};
                             });
  }
}

void check_l2_norm(BothBackends& both, const Size& s, DType dtype) {
  INFO(s.rows << " x " << s.width << " " << name(dtype));
  const Shape shape{s.rows, s.width};
  const Twin x(shape, dtype), y(shape, dtype), dy(shape, dtype),
      inv_norm({s.rows}, acc_type(dtype));
  fill_normal(x.initial.view(), 1, 3.0);
  fill_normal(dy.initial.view(), 2);
  fill_normal(inv_norm.initial.view(), 3, 0.002, 0.03);
  for (const Twin* out : {&y, &x}) {
    require_cuda_matches_cpu(
        both,
        {&x, &y, &inv_norm},
        {{out, elementwise_tolerance(dtype)}, {&inv_norm, sum_tolerance(dtype)}},
        [&](auto side) {
          return L2NormForward{
              .y = side(*out), .inv_norm = side(inv_norm), .x = side(x), .scale = 0.125};
        });
  }
  for (const Twin* out : {&y, &dy}) {
    require_cuda_matches_cpu(
        both, {&x, &y, &dy, &inv_norm}, {{out, elementwise_tolerance(dtype)}}, [&](auto side) {
          return L2NormBackward{.dx = side(*out),
                                .dy = side(dy),
                                .x = side(x),
                                .inv_norm = side(inv_norm),
                                .scale = 0.125};
        });
  }
}

}  // namespace

TEST_CASE("LayerNorm on CUDA matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& s : kSizes) {
    check_layer_norm(both, s, DType::f64, DType::f64, 0.0);
    check_layer_norm(both, s, DType::f32, DType::f32, 0.5);
    check_layer_norm(both, s, DType::bf16, DType::bf16, 0.0);
    check_layer_norm(both, s, DType::bf16, DType::f32, 0.0);
  }
}

TEST_CASE("L2 norm on CUDA matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& s : kSizes) {
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16})
      check_l2_norm(both, s, dtype);
  }
}

}  // namespace moesaic::test
