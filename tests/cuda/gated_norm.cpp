#include "kernels/ops/gated_norm.h"

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

DType acc_type(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}
// Both sides round once, at the end. f32: order of sums and the last bits of the exponential; bf16: a result near the middle
// of two neighbours may go either way (half a step is 2^-9 of it, in few places).
double elementwise_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-13 : dtype == DType::f32 ? 1e-5 : 1e-3;
}
// Sums of terms that differ by the last bits of approximate exponentials (bf16) or by rounding alone.
double sum_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-13 : 2e-5;
}

struct Size {
  std::int64_t tokens, heads, width;
};
// 16, 32 and 256 threads per head for one type or another, odd widths, more heads than the row blocks hold at 64 each.
const Size kSizes[] = {{1, 1, 1},
                       {0, 2, 128},
                       {5, 3, 7},
                       {33, 4, 128},
                       {17, 2, 256},
                       {9, 2, 520},
                       {6, 1, 2304},
                       {3, 1, 33},
                       {1500, 96, 16}};

// Gates from saturated to saturated.
void fill_gate(TensorView gate, std::uint64_t key) {
  fill_normal(gate, key, 3.0);
  dispatch_float(gate.dtype(), [&]<class T>(TypeTag<T>) {
    for (std::int64_t i = 0; i < gate.numel(); i += 11)
      gate.as<T>()[i] = T(i % 2 == 0 ? 90.0 : -90.0);
  });
}

void check_norm(BothBackends& both, const Size& s, DType dtype, DType weight_dtype) {
  INFO(s.tokens << " x " << s.heads << " x " << s.width << " " << name(dtype) << ", weight "
                << name(weight_dtype));
  const Shape shape{s.tokens, s.heads, s.width};
  const DType acc = acc_type(dtype);
  const Twin x(shape, dtype), gate(shape, dtype), y(shape, dtype), dy(shape, dtype),
      dx(shape, dtype), dgate(shape, dtype), weight({s.width}, weight_dtype),
      inv_rms({s.tokens, s.heads}, acc), dweight({s.width}, acc);
  fill_normal(x.initial.view(), 1, 3.0);
  fill_gate(gate.initial.view(), 2);
  fill_normal(weight.initial.view(), 3, 0.2, 1.0);
  fill_normal(dy.initial.view(), 4);
  fill_normal(inv_rms.initial.view(), 5, 0.02, 0.33);
  fill_normal(dweight.initial.view(), 6);
  for (const Twin* out : {&y, &x, &gate}) {
    require_cuda_matches_cpu(
        both,
        {&x, &gate, &y, &weight, &inv_rms},
        {{out, elementwise_tolerance(dtype)}, {&inv_rms, sum_tolerance(dtype)}},
        [&](auto side) {
          return GatedRmsNormForward{.y = side(*out),
                                     .inv_rms = side(inv_rms),
                                     .x = side(x),
                                     .gate = side(gate),
                                     .weight = side(weight)};
        });
  }
  const std::vector<const Twin*> all{&x, &gate, &dy, &dx, &dgate, &weight, &inv_rms, &dweight};
  const std::pair<const Twin*, const Twin*> outputs[] = {
      {&dx, &dgate}, {&dy, &gate}, {&x, &dy}, {&gate, &x}};
  for (const auto& [to_x, to_gate] : outputs) {
    const bool frozen = to_x == &x;
    require_cuda_matches_cpu(both,
                             all,
                             {{to_x, elementwise_tolerance(dtype)},
                              {to_gate, elementwise_tolerance(dtype)},
                              {&dweight, frozen ? 0 : sum_tolerance(dtype)}},
                             [&, to_x = to_x, to_gate = to_gate](auto side) {
                               return GatedRmsNormBackward{
                                   .dx = side(*to_x),
                                   .dgate = side(*to_gate),
                                   .dweight = frozen ? TensorView() : side(dweight),
                                   .dy = side(dy),
                                   .x = side(x),
                                   .gate = side(gate),
                                   .weight = side(weight),
                                   .inv_rms = side(inv_rms)};
                             });
  }
}

}  // namespace

TEST_CASE("Gated RMSNorm on CUDA matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& s : kSizes) {
    check_norm(both, s, DType::f64, DType::f64);
    check_norm(both, s, DType::f32, DType::f32);
    check_norm(both, s, DType::bf16, DType::bf16);
    check_norm(both, s, DType::bf16, DType::f32);
  }
}

TEST_CASE("Sigmoid gate on CUDA matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    for (const std::int64_t n : {0, 1, 9, 4096, 100003}) {
      INFO(n << " " << name(dtype));
      const Twin x({n}, dtype), gate({n}, dtype), y({n}, dtype), dy({n}, dtype), dgate({n}, dtype);
      fill_normal(x.initial.view(), 1);
      fill_gate(gate.initial.view(), 2);
      fill_normal(dy.initial.view(), 3);
      const double tolerance = elementwise_tolerance(dtype);
      for (const Twin* out : {&y, &x, &gate}) {
        require_cuda_matches_cpu(both, {&x, &gate, &y}, {{out, tolerance}}, [&](auto side) {
          return SigmoidGateForward{.y = side(*out), .x = side(x), .gate = side(gate)};
        });
      }
      require_cuda_matches_cpu(both,
                               {&x, &gate, &dy, &y, &dgate},
                               {{&y, tolerance}, {&dgate, tolerance}},
                               [&](auto side) {
                                 return SigmoidGateBackward{.dx = side(y),
                                                            .dgate = side(dgate),
                                                            .dy = side(dy),
                                                            .x = side(x),
                                                            .gate = side(gate)};
                               });
      require_cuda_matches_cpu(
          both, {&x, &gate, &dy}, {{&dy, tolerance}, {&gate, tolerance}}, [&](auto side) {
            return SigmoidGateBackward{.dx = side(dy),
                                       .dgate = side(gate),
                                       .dy = side(dy),
                                       .x = side(x),
                                       .gate = side(gate)};
          });
    }
  }
}

}  // namespace moesaic::test
