#include "core/base/split_float.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/base/random.h"
#include "tests/support/catch.h"

namespace moesaic {
namespace {

bool is_nan(std::uint32_t bits) {
  return (bits & 0x7fffffffU) > 0x7f800000U;
}

// Zeros, subnormals, the smallest and largest normal numbers, powers of two, infinities, NaN; both signs; and samples.
std::vector<std::uint32_t> upper_halves() {
  std::vector<std::uint32_t> halves;
  for (const std::uint32_t h :
       {0x0000U, 0x0001U, 0x0002U, 0x003fU, 0x007eU, 0x007fU, 0x0080U, 0x0081U,
        0x3f7fU, 0x3f80U, 0x3f81U, 0x4000U, 0x7effU, 0x7f00U, 0x7f7eU, 0x7f7fU,
        0x7f80U, 0x7f81U, 0x7fbfU, 0x7fc0U, 0x7ffeU, 0x7fffU}) {
    halves.push_back(h);
    halves.push_back(h | 0x8000U);
  }
  for (std::uint64_t i = 0; i < 100; ++i)
    halves.push_back(static_cast<std::uint32_t>(uniform(5, i) * 65536.0));
  return halves;
}

}  // namespace

TEST_CASE("split f32: every lower half next to all kinds of upper halves") {
  std::int64_t wrong_bits = 0, wrong_weights = 0, wrong_nans = 0;
  for (const std::uint32_t high : upper_halves()) {
    for (std::uint32_t low = 0; low < 0x10000U; ++low) {
      const std::uint32_t bits = (high << 16) | low;
      const SplitBits s = split_bits(bits);
      if (is_nan(bits)) {
        const std::uint32_t quiet = (bits & 0x80000000U) | 0x7fc00000U;
        wrong_nans += join_bits(s.weight, s.remainder) != quiet || s.weight != quiet >> 16 ? 1 : 0;
        continue;
      }
      wrong_bits += join_bits(s.weight, s.remainder) != bits ? 1 : 0;
      // To the nearest; only a tie may differ from bf16's rounding, and goes up in the magnitude.
      const std::uint32_t want = low == 0x8000U ? high + 1 : bf16(std::bit_cast<float>(bits)).bits;
      wrong_weights += s.weight != want ? 1 : 0;
    }
  }
  CHECK(wrong_bits == 0);
  CHECK(wrong_weights == 0);
  CHECK(wrong_nans == 0);
}

TEST_CASE("split f32: a bf16 number has remainder 0 and stays") {
  for (std::uint32_t h = 0; h < 0x10000U; ++h) {
    if (is_nan(h << 16)) continue;
    const SplitBits s = split_bits(h << 16);
    REQUIRE(s.weight == h);
    REQUIRE(s.remainder == 0);
    REQUIRE(join_bits(h, 0) == h << 16);
  }
}

TEST_CASE("split f32: what kernels see of numbers at the ends of the range") {
  const auto weight = [](float value) {
    bf16 w;
    std::uint16_t r = 0;
    split_float(value, w, r);
    const float back = join_float(w, r);
    CHECK((std::isnan(value) ? std::isnan(back) : std::memcmp(&back, &value, sizeof(float)) == 0));
    return static_cast<float>(w);
  };
  using limits = std::numeric_limits<float>;
  CHECK(weight(limits::max()) == limits::infinity());  // and comes back finite
  CHECK(weight(-limits::max()) == -limits::infinity());
  CHECK(weight(std::bit_cast<float>(0x7f7f7fffU)) == std::bit_cast<float>(0x7f7f0000U));
  CHECK(weight(limits::infinity()) == limits::infinity());
  CHECK(weight(limits::denorm_min()) == 0.0F);
  CHECK(std::signbit(weight(-limits::denorm_min())));
  CHECK(std::signbit(weight(-0.0F)));
  // All bits set would be carried into a zero.
  CHECK(std::isnan(weight(std::bit_cast<float>(0x7fffffffU))));
  CHECK(std::isnan(weight(std::bit_cast<float>(0xffffffffU))));
}

}  // namespace moesaic
