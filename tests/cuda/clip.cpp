#include "kernels/ops/clip.h"

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

// Both sides add in f64, in different fixed orders; all terms are positive.
constexpr double kSumTolerance = 1e-13;

struct Size {
  std::int64_t sums, elements;  // of each sum
};
// Around the block of 4096, members that start without alignment, more blocks than one finishing block has threads.
const Size kSizes[] = {
    {1, 1}, {1, 0}, {3, 0}, {5, 7}, {4, 4096}, {3, 4095}, {7, 4104}, {896, 33}, {1, 3000000}};

void set_scalar(const Twin& scalars, StepScalar slot, double value) {
  dispatch_float(scalars.initial.view().dtype(), [&]<class T>(TypeTag<T>) {
    scalars.initial.data<T>()[index_of(slot)] = T(value);
  });
}

}  // namespace

TEST_CASE("SumOfSquares on CUDA matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    for (const auto& s : kSizes) {
      INFO(s.sums << " sums of " << s.elements << " " << name(dtype));
      const Twin x({s.sums, s.elements}, dtype), partials({s.sums}, DType::f64);
      fill_normal(x.initial.view(), 1, 1e-4);
      fill_normal(partials.initial.view(), 2);
      require_cuda_matches_cpu(both, {&x, &partials}, {{&partials, kSumTolerance}}, [&](auto side) {
        return SumOfSquares{.partials = side(partials), .x = side(x)};
      });
    }
  }
}

TEST_CASE("SumOfSquares on CUDA puts sums where an index says, like the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  constexpr std::int64_t kSums = 70, kPlaces = 90;
  const Twin x({kSums, 5000}, DType::f32), partials({kPlaces}, DType::f64),
      index({kSums}, DType::i32);
  fill_normal(x.initial.view(), 1, 1e-4);
  fill_normal(partials.initial.view(), 2);
  for (std::int64_t i = 0; i < kSums; ++i)
    index.initial.data<std::int32_t>()[i] = static_cast<std::int32_t>((i * 7 + 3) % kPlaces);
  require_cuda_matches_cpu(
      both, {&x, &partials, &index}, {{&partials, kSumTolerance}}, [&](auto side) {
        return SumOfSquares{.partials = side(partials), .x = side(x), .index = side(index)};
      });
}

TEST_CASE("SumOfSquares on CUDA is finite exactly when every element is", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  auto& stream = both.cuda.stream();
  const Twin x({4, 5000}, DType::f32), partials({4}, DType::f64);
  fill_normal(x.initial.view(), 1, 1e30);  // squares beyond f32
  x.initial.data<float>()[5000 + 4999] = INFINITY;
  x.initial.data<float>()[10000] = NAN;
  x.reset(stream);
  run(both.cuda.backend(), SumOfSquares{.partials = partials.device.view(), .x = x.device.view()});
  const OwnedTensor got = download(partials.device.view(), stream);
  CHECK(std::isfinite(got.data<double>()[0]));
  CHECK_FALSE(std::isfinite(got.data<double>()[1]));
  CHECK_FALSE(std::isfinite(got.data<double>()[2]));
  CHECK(std::isfinite(got.data<double>()[3]));
}

TEST_CASE("ClipFactor on CUDA matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const DType master : {DType::f64, DType::f32}) {
    for (const std::int64_t n : {0, 1, 37, 5000}) {
      for (const double limit : {0.0, 1.0, 1e6}) {
        INFO(n << " partials, limit " << limit << ", master " << name(master));
        const Twin partials({n}, DType::f64), norm({1}, DType::f64),
            scalars({kNumStepScalars}, master);
        for (std::int64_t i = 0; i < n; ++i)
          partials.initial.data<double>()[i] = uniform(1, static_cast<std::uint64_t>(i));
        fill_normal(norm.initial.view(), 2);
        fill_normal(scalars.initial.view(), 3);
        require_cuda_matches_cpu(both,
                                 {&partials, &norm, &scalars},
                                 {{&norm, 1e-14}, {&scalars, master == DType::f64 ? 1e-14 : 1e-7}},
                                 [&](auto side) {
                                   return ClipFactor{.scalars = side(scalars),
                                                     .norm = side(norm),
                                                     .partials = side(partials),
                                                     .limit = limit};
                                 });
      }
    }
    const Twin partials({5}, DType::f64), norm({1}, DType::f64), scalars({kNumStepScalars}, master);
    fill_normal(scalars.initial.view(), 3);
    partials.initial.data<double>()[4] = INFINITY;
    require_cuda_matches_cpu(both, {&partials, &norm, &scalars}, {{&scalars, 0}}, [&](auto side) {
      return ClipFactor{.scalars = side(scalars), .norm = side(norm), .partials = side(partials)};
    });
  }
}

TEST_CASE("MovingAverage on CUDA matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const DType dtype : {DType::f64, DType::f32}) {
    for (const std::int64_t n : {0, 1, 1003, 100000}) {
      for (const double skip : {-1.0, 0.0, 1.0}) {  // -1: no scalars
        INFO(n << " " << name(dtype) << ", skip " << skip);
        const Twin average({n}, dtype), w({n}, dtype), scalars({kNumStepScalars}, dtype);
        fill_normal(average.initial.view(), 1);
        fill_normal(w.initial.view(), 2);
        set_scalar(scalars, StepScalar::skip, skip);
        // Contraction of the products is the only difference.
        const double tolerance = skip == 1.0 ? 0 : dtype == DType::f64 ? 1e-15 : 1e-7;
        require_cuda_matches_cpu(
            both, {&average, &w, &scalars}, {{&average, tolerance}}, [&](auto side) {
              return MovingAverage{.average = side(average),
                                   .w = side(w),
                                   .scalars = skip < 0 ? TensorView() : side(scalars),
                                   .decay = 0.99};
            });
      }
    }
  }
}

}  // namespace moesaic::test
