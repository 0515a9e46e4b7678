#include "kernels/ops/clip.h"
#include "tests/ops/moe_support.h"

namespace moesaic {
namespace {

using moe_test::CpuRunner;
using moe_test::filled;
using moe_test::normal;
using moe_test::one;
using moe_test::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Clipped {
  double factor, skip, norm;
};

Clipped clip(const std::vector<double>& partials, double limit, double skip_before = 0) {
  CpuRunner run;
  const Tensor scalars({kNumStepScalars}, DType::f64), norm({1}, DType::f64);
  StepScalars{.skip = skip_before}.write(scalars);
  const Tensor p({static_cast<std::int64_t>(partials.size())}, DType::f64, partials);
  run(ClipFactor{.scalars = scalars, .norm = norm, .partials = p, .limit = limit});
  CHECK(scalars.at(index_of(StepScalar::weight_decay_scale)) == 1.0);
  return {scalars.at(index_of(StepScalar::clip_factor)),
          scalars.at(index_of(StepScalar::skip)),
          norm.at(0)};
}

}  // namespace

TEST_CASE("Sum of squares: per tensor, per expert, over block borders, in every type") {
  CpuRunner run(2);
  for (const DType type : {DType::f64, DType::f32, DType::bf16}) {
    for (const auto& [n, size] :
         {std::pair<std::int64_t, std::int64_t>{1, 1}, {1, 10000}, {3, 4096}, {5, 4097}, {2, 0}}) {
      const Tensor x = normal({n, size}, type, 71), partials({n}, DType::f64);
      run(SumOfSquares{.partials = partials, .x = x});
      for (std::int64_t i = 0; i < n; ++i) {
        double want = 0;
        for (std::int64_t j = 0; j < size; ++j)
          want += x.at(i * size + j) * x.at(i * size + j);
        REQUIRE(partials.at(i) == Approx(want).epsilon(1e-13));
      }
    }
  }
  const Tensor x = normal({2, 3}, DType::f32, 72);
  CHECK_THROWS_AS(run(SumOfSquares{.partials = Tensor({4}, DType::f64), .x = x}), InternalError);
}

TEST_CASE("Sum of squares: sums go to the places of an index, the others stay") {
  CpuRunner run(2);
  const Tensor x = normal({3, 5000}, DType::f32, 77), straight({3}, DType::f64),
               partials = filled({5}, DType::f64, -1.0);
  const Tensor index({3}, DType::i32, std::vector<int>{4, 0, 2});
  run(SumOfSquares{.partials = straight, .x = x});
  run(SumOfSquares{.partials = partials, .x = x, .index = index});
  CHECK(partials.values() ==
        std::vector<double>{straight.at(1), -1.0, straight.at(2), -1.0, straight.at(0)});
  CHECK_THROWS_AS(run(SumOfSquares{.partials = Tensor({2}, DType::f64), .x = x, .index = index}),
                  InternalError);
}

TEST_CASE("Sum of squares: large floats do not overflow; threads do not change a bit") {
  CpuRunner one_thread(1), three(3);
  const Tensor large = filled({8}, DType::f32, 1e30), a({1}, DType::f64), b({1}, DType::f64);
  one_thread(SumOfSquares{.partials = a, .x = large});
  CHECK(a.at(0) == Approx(8e60));
  const Tensor x = normal({123457}, DType::f32, 73);
  one_thread(SumOfSquares{.partials = a, .x = x});
  three(SumOfSquares{.partials = b, .x = x});
  CHECK(same_bits(a, b));
}

TEST_CASE("Clip factor: below, above and without a limit") {
  CHECK(clip({0.25, 0.11}, 1.0).factor == 1.0);
  CHECK(clip({9.0, 16.0}, 1.0).factor == Approx(1.0 / (5.0 + 1e-6)).epsilon(1e-15));
  CHECK(clip({9.0, 16.0}, 1.0).norm == 5.0);
  CHECK(clip({9.0, 16.0}, 0.0).factor == 1.0);
  CHECK(clip({}, 1.0).factor == 1.0);
  CHECK(clip({9.0, 16.0}, 1.0).skip == 0.0);
  CHECK(clip({9.0, 16.0}, 1.0, 1.0).skip == 1.0);  // somebody else's reason stands
}

TEST_CASE("Clip factor: a gradient that is not finite skips the step") {
  for (const double bad : {kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
    for (const double limit : {0.0, 1.0}) {
      const auto c = clip({1.0, bad}, limit);
      CHECK(c.skip == 1.0);
      CHECK(c.factor == 0.0);
      CHECK_FALSE(std::isfinite(c.norm));
    }
  }
  CpuRunner run;
  for (const DType type : {DType::f64, DType::f32, DType::bf16}) {
    const Tensor x = normal({9000}, type, 74), partial({1}, DType::f64);
    x.set(8999, -kInfinity);
    run(SumOfSquares{.partials = partial, .x = x});
    CHECK_FALSE(std::isfinite(partial.at(0)));
  }
}

TEST_CASE("Moving average: decay, and a skipped step") {
  CpuRunner run;
  const Tensor average = normal({5000}, DType::f32, 75), w = normal({5000}, DType::f32, 76),
               scalars({kNumStepScalars}, DType::f32);
  const auto a = average.values();
  StepScalars{.skip = 1}.write(scalars);
  run(MovingAverage{.average = average, .w = w, .scalars = scalars, .decay = 0.9});
  CHECK(average.values() == a);
  StepScalars{}.write(scalars);
  run(MovingAverage{.average = average, .w = w, .scalars = scalars, .decay = 0.9});
  for (std::int64_t i = 0; i < 5000; ++i)
    REQUIRE(average.at(i) ==
            Approx(0.9 * a[static_cast<std::size_t>(i)] + 0.1 * w.at(i)).margin(1e-6));
  CHECK_THROWS_AS(
      run(MovingAverage{.average = average, .w = normal({4}, DType::f32, 1), .scalars = {}}),
      InternalError);
}

}  // namespace moesaic
