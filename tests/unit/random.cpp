#include "core/base/random.h"

#include <cmath>
#include <cstdint>

#include "tests/support/catch.h"

namespace moesaic {
namespace {

TEST_CASE("philox gives the published numbers", "[random]") {
  // Known answers of Random123 for philox4x32-10.
  const auto zeros = philox(0, 0, 0);
  CHECK(zeros[0] == 0x6627e8d5U);
  CHECK(zeros[1] == 0xe169c58dU);
  CHECK(zeros[2] == 0xbc57ac4cU);
  CHECK(zeros[3] == 0x9b00dbd8U);
  const auto ones = philox(~std::uint64_t{0}, ~std::uint64_t{0}, ~std::uint64_t{0});
  CHECK(ones[0] == 0x408f276dU);
  CHECK(ones[1] == 0x41c83b0eU);
  CHECK(ones[2] == 0xa20bc7c6U);
  CHECK(ones[3] == 0x6d5451fdU);
}

TEST_CASE("portable logarithm and exponential agree with the library", "[random]") {
  for (const double x : {1e-300, 1e-4, 0.3, 0.99999, 1.0, 1.5, 7.0, 1e10})
    CHECK(portable_log(x) == Approx(std::log(x)).epsilon(1e-13).margin(1e-16));
  for (const double x : {-300.0, -9.2, -1e-4, 0.0, 1e-9, 0.5, 3.0, 100.0})
    CHECK(portable_exp(x) == Approx(std::exp(x)).epsilon(1e-13));
}

TEST_CASE("normal numbers have the moments of the normal distribution", "[random]") {
  constexpr int kCount = 200000;
  double sum = 0, squares = 0, fourth = 0, tail = 0;
  for (int i = 0; i < kCount; ++i) {
    const double x = standard_normal(42, static_cast<std::uint64_t>(i));
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
    tail += std::abs(x) > 3 ? 1 : 0;
  }
  CHECK(std::abs(sum / kCount) < 0.01);
  CHECK(squares / kCount == Approx(1.0).epsilon(0.02));
  CHECK(fourth / kCount == Approx(3.0).epsilon(0.05));
  CHECK(tail / kCount == Approx(0.0027).epsilon(0.2));
  CHECK(standard_normal(42, 7) == standard_normal(42, 7));
  CHECK(standard_normal(42, 7) != standard_normal(43, 7));
}

}  // namespace
}  // namespace moesaic
