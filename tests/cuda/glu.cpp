#include "kernels/ops/glu.h"

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

DType acc_type(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}
// One rounding at the end on both sides; f32 differs by the last bits of exponentials, bf16 also where a result lies near the
// middle of two neighbours.
double elementwise_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-13 : dtype == DType::f32 ? 3e-6 : 1e-3;
}
double sum_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-12 : 3e-5;
}

struct Size {
  std::int64_t rows, width, used;  // used = -1: no row_count
};
const Size kSizes[] = {{1, 1, -1},
                       {0, 8, -1},
                       {7, 33, 5},
                       {65, 128, 64},
                       {40, 512, 0},
                       {33, 1032, -1},
                       {130, 1408, 129},
                       {5, 6144, 5},
                       {700, 24, 650}};

// From far below to far above zero: the gates and both limits saturate in places.
void fill_wide(TensorView view, std::uint64_t key) {
  fill_normal(view, key, 4.0);
  dispatch_float(view.dtype(), [&]<class T>(TypeTag<T>) {
    for (std::int64_t i = 0; i < view.numel(); i += 13)
      view.as<T>()[i] = T((i % 2 == 0 ? 1.0 : -1.0) * (i % 3 == 0 ? 100.0 : 1e-3));
  });
}

void check_glu(BothBackends& both, const Size& s, DType dtype, GluKind kind) {
  INFO(s.rows << " x " << s.width << ", used " << s.used << ", " << name(dtype) << ", situ "
              << (kind == GluKind::situ));
  const DType acc = acc_type(dtype);
  const Twin gate_up({s.rows, 2 * s.width}, dtype), h({s.rows, s.width}, dtype),
      dh({s.rows, s.width}, dtype), dgate_up({s.rows, 2 * s.width}, dtype), weight({s.rows}, acc),
      dweight({s.rows}, acc), count({1}, DType::i32);
  fill_wide(gate_up.initial.view(), 1);
  fill_normal(h.initial.view(), 2);
  fill_normal(dh.initial.view(), 3);
  fill_normal(dgate_up.initial.view(), 4);
  fill_normal(weight.initial.view(), 5, 0.3, 0.5);
  fill_normal(dweight.initial.view(), 6);
  count.initial.data<std::int32_t>()[0] = static_cast<std::int32_t>(s.used);
  const GluActivation activation{.kind = kind, .beta1 = 4.0, .beta2 = 25.0};
  const double tolerance = elementwise_tolerance(dtype);
  const auto used = [&](TensorView view) { return s.used < 0 ? TensorView() : view; };
  require_cuda_matches_cpu(both, {&gate_up, &h, &count}, {{&h, tolerance}}, [&](auto side) {
    return GluForward{.h = side(h),
                      .gate_up = side(gate_up),
                      .row_count = used(side(count)),
                      .activation = activation};
  });
  const std::vector<const Twin*> all{&gate_up, &h, &dh, &dgate_up, &weight, &dweight, &count};
  require_cuda_matches_cpu(both, all, {{&dgate_up, tolerance}}, [&](auto side) {
    return GluBackward{.dgate_up = side(dgate_up),
                       .dh = side(dh),
                       .gate_up = side(gate_up),
                       .row_count = used(side(count)),
                       .activation = activation};
  });
  for (const bool weight_h : {false, true}) {  // weight_h: outputs also lie on inputs
    const Twin &to = weight_h ? gate_up : dgate_up, &to_h = weight_h ? dh : h;
    require_cuda_matches_cpu(
        both,
        all,
        {{&to, tolerance}, {&to_h, tolerance}, {&dweight, sum_tolerance(dtype)}},
        [&](auto side) {
          return GluBackward{.dgate_up = side(to),
                             .drow_weight = side(dweight),
                             .h = side(to_h),
                             .dh = side(dh),
                             .gate_up = side(gate_up),
                             .row_weight = side(weight),
                             .row_count = used(side(count)),
                             .activation = activation,
                             .weight_h = weight_h};
        });
  }
}

}  // namespace

TEST_CASE("Gated linear units on CUDA match the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& s : kSizes) {
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
      check_glu(both, s, dtype, GluKind::swiglu);
      check_glu(both, s, dtype, GluKind::situ);
    }
  }
}

}  // namespace moesaic::test
