#include "kernels/ops/initial_values.h"

#include <cmath>

#include "core/base/random.h"
#include "kernels/backend.h"
#include "tests/support/catch.h"

namespace moesaic {
namespace {

std::vector<double> draw(InitialKind kind, double a, double b, std::int64_t n, int threads) {
  BackendOwner owner(
      {.device = kCpu, .mode = Stream::Mode::immediate, .num_threads = threads, .name = "test"});
  std::vector<double> values(static_cast<std::size_t>(n));
  run(owner.backend(),
      InitialValues{.y = TensorView(reinterpret_cast<std::byte*>(values.data()), DType::f64, {n}),
                    .kind = kind,
                    .a = a,
                    .b = b,
                    .key = 99});
  return values;
}

TEST_CASE("Initial values follow their distributions and do not depend on threads") {
  constexpr std::int64_t kCount = 50000;
  const auto normal = draw(InitialKind::normal, 2.0, 1.0, kCount, 1);
  CHECK(normal == draw(InitialKind::normal, 2.0, 1.0, kCount, 3));
  double sum = 0, squares = 0;
  for (const double v : normal) {
    CHECK(std::abs(v - 1.0) <= 6.0);
    sum += v;
    squares += (v - 1.0) * (v - 1.0);
  }
  CHECK(std::abs(sum / kCount - 1.0) < 0.05);
  CHECK(std::abs(std::sqrt(squares / kCount) - 2.0) < 0.05);
  const auto dt = draw(InitialKind::inverse_softplus, 1e-3, 1e-1, 1000, 1);
  for (const double v : dt) {
    const double softplus = std::log1p(std::exp(v));
    CHECK(softplus > 0.999e-3);
    CHECK(softplus < 1.001e-1);
  }
  const auto log_uniform = draw(InitialKind::log_uniform, 1, 16, 1000, 1);
  for (std::size_t i = 0; i < log_uniform.size(); ++i)
    CHECK(std::abs(std::exp(log_uniform[i]) - (1 + 15 * uniform(99, i))) < 1e-11);
}

TEST_CASE("An initial value depends on its key and index alone") {
  const auto some = draw(InitialKind::uniform, -1, 1, 10, 1);
  const auto more = draw(InitialKind::uniform, -1, 1, 5000, 2);
  CHECK(std::equal(some.begin(), some.end(), more.begin()));
}

}  // namespace
}  // namespace moesaic
