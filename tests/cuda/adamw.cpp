#include "kernels/ops/adamw.h"

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

void check(BothBackends& both,
           std::int64_t n,
           DType master,
           DType grad,
           DType compute,
           bool with_copy,
           bool skip) {
  INFO(n << " elements, master " << name(master) << ", grad " << name(grad) << ", copy "
         << (with_copy ? name(compute) : "none") << ", skip " << skip);
  const Twin w({n}, master), m({n}, master), v({n}, master), w_compute({n}, compute), dw({n}, grad),
      scalars({kNumStepScalars}, master);
  fill_normal(w.initial.view(), 1);
  fill_normal(m.initial.view(), 2, 0.1);
  fill_normal(v.initial.view(), 3, 0.001, 0.01);  // ten spreads above zero
  fill_normal(w_compute.initial.view(), 4);
  fill_normal(dw.initial.view(), 5);
  StepScalars{.learning_rate = 1e-2,
              .weight_decay_scale = 0.5,
              .bias_correction1 = bias_correction(0.9, 3),
              .bias_correction2 = bias_correction(0.95, 3),
              .clip_factor = 0.3,
              .skip = skip ? 1.0 : 0.0}
      .write(scalars.initial.view());
  const double exact = skip ? 0 : master == DType::f64 ? 1e-14 : 1e-6;
  const double rounded = skip ? 0 : compute == DType::bf16 ? 1e-3 : exact;
  require_cuda_matches_cpu(
      both,
      {&w, &m, &v, &w_compute, &dw, &scalars},
      {{&w, exact}, {&m, exact}, {&v, exact}, {&w_compute, with_copy ? rounded : 0}},
      [&](auto side) {
        return AdamW{.w = side(w),
                     .m = side(m),
                     .v = side(v),
                     .w_compute = with_copy ? side(w_compute) : TensorView(),
                     .dw = side(dw),
                     .scalars = side(scalars),
                     .lr_scale = 0.7,
                     .weight_decay = 0.1};
      });
}

}  // namespace

TEST_CASE("AdamW on CUDA matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const std::int64_t n : {1, 3, 4, 257, 1000003}) {
    check(both, n, DType::f64, DType::f64, DType::f64, true, false);
    check(both, n, DType::f32, DType::f32, DType::f32, false, false);
    check(both, n, DType::f32, DType::f32, DType::bf16, true, false);
    check(both, n, DType::f32, DType::bf16, DType::bf16, true, false);
    check(both, n, DType::f32, DType::bf16, DType::f32, true, false);
    check(both, n, DType::f32, DType::f32, DType::bf16, true, true);
  }
}

TEST_CASE("AdamW on CUDA: an update by ranges has the bits of one update", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  auto& stream = both.cuda.stream();
  constexpr std::int64_t kNumElements = 1001;
  const Twin w({kNumElements}, DType::f32), m({kNumElements}, DType::f32),
      v({kNumElements}, DType::f32), dw({kNumElements}, DType::f32),
      scalars({kNumStepScalars}, DType::f32);
  fill_normal(w.initial.view(), 1);
  fill_normal(dw.initial.view(), 2);
  StepScalars{.learning_rate = 1e-2, .bias_correction1 = 0.1, .bias_correction2 = 0.05}.write(
      scalars.initial.view());
  const auto update = [&](std::vector<std::int64_t> borders) {
    for (const auto* twin : {&w, &m, &v, &dw, &scalars})
      twin->reset(stream);
    for (std::size_t i = 0; i + 1 < borders.size(); ++i) {
      const auto range = [&](const Twin& t) {
        return t.device.view().rows(borders[i], borders[i + 1]);
      };
      run(both.cuda.backend(),
          AdamW{.w = range(w),
                .m = range(m),
                .v = range(v),
                .dw = range(dw),
                .scalars = scalars.device.view(),
                .weight_decay = 0.1});
    }
    return download(w.device.view(), stream);
  };
  CHECK(same_bits(update({0, kNumElements}).view(),
                  update({0, 1, 5, 333, 1000, kNumElements}).view()));
}

}  // namespace moesaic::test
