#include "kernels/ops/adamw.h"

#include <cmath>
#include <vector>

#include "core/base/random.h"
#include "kernels/backend.h"
#include "tests/support/catch.h"

namespace moesaic {
namespace {

template <class T>
TensorView view(std::vector<T>& v) {
  return {
      reinterpret_cast<std::byte*>(v.data()), dtype_of<T>, {static_cast<std::int64_t>(v.size())}};
}

template <class T>
std::vector<T> numbers(std::size_t n, std::uint64_t key, double spread) {
  std::vector<T> v(n);
  for (std::size_t i = 0; i < n; ++i)
    v[i] = T(spread * standard_normal(key, i));
  return v;
}

// One scalar weight by SPEC section 7.1, in double.
struct Reference {
  double w, m = 0, v = 0;
  void step(double g, int t, double lr, double weight_decay) {
    m = 0.9 * m + 0.1 * g;
    v = 0.95 * v + 0.05 * g * g;
    const double mh = m / (1 - std::pow(0.9, t)), vh = v / (1 - std::pow(0.95, t));
    w -= lr * (mh / (std::sqrt(vh) + 1e-8) + weight_decay * w);
  }
};

struct Tolerance {
  double relative;
};

// Three steps of `n` weights with all factors different from 1.
template <class M, class G, class C>
void check_steps(std::size_t n, Tolerance tolerance) {
  constexpr double kLrScale = 0.5, kDecay = 0.2;
  auto w = numbers<M>(n, 1, 1.0);
  std::vector<M> m(n), v(n), scalars(kNumStepScalars);
  std::vector<C> copy(n);
  std::vector<Reference> want;
  for (const M x : w)
    want.push_back({static_cast<double>(x)});
  BackendOwner owner({.mode = Stream::Mode::immediate, .num_threads = 2});
  for (int t = 1; t <= 3; ++t) {
    const StepScalars step{.learning_rate = 0.01 * t,
                           .weight_decay_scale = 0.25 * t,
                           .bias_correction1 = bias_correction(0.9, t),
                           .bias_correction2 = bias_correction(0.95, t),
                           .clip_factor = 0.4};
    step.write(view(scalars));
    auto g = numbers<G>(n, 10 + static_cast<std::uint64_t>(t), 2.0);
    run(owner.backend(),
        AdamW{.w = view(w),
              .m = view(m),
              .v = view(v),
              .w_compute = view(copy),
              .dw = view(g),
              .scalars = view(scalars),
              .lr_scale = kLrScale,
              .weight_decay = kDecay});
    double worst = 0;
    for (std::size_t i = 0; i < n; ++i) {
      want[i].step(0.4 * static_cast<double>(g[i]), t, 0.01 * t * kLrScale, kDecay * 0.25 * t);
      const auto error = [](double got, double expected) {
        return std::abs(got - expected) / (std::abs(expected) + 0.1);
      };
      worst = std::max({worst,
                        error(static_cast<double>(w[i]), want[i].w),
                        error(static_cast<double>(m[i]), want[i].m),
                        error(static_cast<double>(v[i]), want[i].v)});
      if (static_cast<float>(C(w[i])) != static_cast<float>(copy[i])) worst = 1;
    }
    INFO("step " << t);
    CHECK(worst < tolerance.relative);
  }
}

}  // namespace

TEST_CASE("AdamW follows the formula over three steps, for all dtypes") {
  check_steps<double, double, double>(1, {1e-14});
  check_steps<double, double, double>(40001, {1e-14});
  check_steps<float, float, float>(40001, {2e-6});
  check_steps<float, float, bf16>(40001, {2e-6});
  check_steps<float, bf16, bf16>(40001, {2e-6});
}

TEST_CASE("AdamW: with the skip flag nothing changes, whatever the gradient holds") {
  std::vector<float> w = {1, 2}, m = {3, 4}, v = {5, 6}, dw = {NAN, INFINITY},
                     scalars(kNumStepScalars);
  std::vector<bf16> copy = {bf16(7.0F), bf16(8.0F)};
  StepScalars{.learning_rate = 1, .skip = 1}.write(view(scalars));
  BackendOwner owner({.mode = Stream::Mode::immediate});
  const AdamW op{.w = view(w),
                 .m = view(m),
                 .v = view(v),
                 .w_compute = view(copy),
                 .dw = view(dw),
                 .scalars = view(scalars)};
  run(owner.backend(), op);
  CHECK(w == std::vector<float>{1, 2});
  CHECK(m == std::vector<float>{3, 4});
  CHECK(v == std::vector<float>{5, 6});
  CHECK(static_cast<float>(copy[0]) == 7.0F);
  CHECK(static_cast<float>(copy[1]) == 8.0F);
}

TEST_CASE(
    "AdamW: the bits of an element depend neither on threads nor on the range it is updated in") {
  constexpr std::int64_t kNumElements = 50007;
  const auto update = [](const std::vector<std::int64_t>& borders, int threads) {
    auto w = numbers<float>(kNumElements, 1, 1.0), dw = numbers<float>(kNumElements, 2, 1.0);
    std::vector<float> m(kNumElements), v(kNumElements), scalars(kNumStepScalars);
    StepScalars{.learning_rate = 0.01, .bias_correction1 = 0.1, .bias_correction2 = 0.05}.write(
        view(scalars));
    BackendOwner owner({.mode = Stream::Mode::immediate, .num_threads = threads});
    for (std::size_t i = 0; i + 1 < borders.size(); ++i) {
      const auto range = [&](std::vector<float>& x) {
        return view(x).rows(borders[i], borders[i + 1]);
      };
      run(owner.backend(),
          AdamW{.w = range(w),
                .m = range(m),
                .v = range(v),
                .dw = range(dw),
                .scalars = view(scalars),
                .weight_decay = 0.1});
    }
    return w;
  };
  const auto whole = update({0, kNumElements}, 1);
  CHECK(whole == update({0, kNumElements}, 3));
  CHECK(whole == update({0, 1, 6, 777, 40000, kNumElements}, 1));
}

TEST_CASE("Bias corrections are exact for betas near one, and step scalars are checked") {
  CHECK(bias_correction(0.9, 1) == Approx(0.1).epsilon(1e-15));
  CHECK(bias_correction(0.95, 2) == Approx(1 - 0.95 * 0.95).epsilon(1e-14));
  CHECK(bias_correction(1 - 1e-12, 1) ==
        Approx(1e-12).epsilon(1e-4));  // 1 - 1e-12 itself is rounded
  CHECK(bias_correction(0.0, 5) == 1.0);
  std::vector<float> scalars(kNumStepScalars), few(2);
  CHECK_NOTHROW(check_step_scalars(view(scalars), DType::f32));
  CHECK_THROWS_AS(check_step_scalars(view(few), DType::f32), InternalError);
  CHECK_THROWS_AS(check_step_scalars(view(scalars), DType::f64), InternalError);
}

}  // namespace moesaic
