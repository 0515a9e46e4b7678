#include "core/data/permutation.h"

#include "core/base/error.h"
#include "core/base/random.h"

namespace moesaic::data {
namespace {
constexpr int kRounds = 8;
}

KeyedPermutation::KeyedPermutation(std::int64_t n, std::uint64_t key) : n_(n), key_(key) {
  MOESAIC_CHECK(n >= 1, "a permutation needs at least one element");
  while (half_bits_ < 31 && (std::int64_t{1} << (2 * half_bits_)) < n)
    ++half_bits_;
  MOESAIC_CHECK((std::int64_t{1} << (2 * half_bits_)) >= n,
                "a permutation of more than 2^62 elements");
}

std::int64_t KeyedPermutation::operator()(std::int64_t i) const {
  MOESAIC_CHECK(0 <= i && i < n_, "index outside the permutation");
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  auto x = static_cast<std::uint64_t>(i);
  do {
    std::uint64_t left = x >> half_bits_, right = x & mask;
    for (std::uint64_t round = 0; round < kRounds; ++round) {
      const std::uint64_t next = left ^ (mix64(key_ ^ mix64(right + (round << 56))) & mask);
      left = right;
      right = next;
    }
    x = left << half_bits_ | right;
  } while (x >= static_cast<std::uint64_t>(n_));
  return static_cast<std::int64_t>(x);
}

}  // namespace moesaic::data
