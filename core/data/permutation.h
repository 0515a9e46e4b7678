#pragma once
#include <cstdint>

namespace moesaic::data {

/// A bijection of [0, n) chosen by a key, evaluated per element without a table: a balanced Feistel
/// network on the next even power of two, repeated until the result lies below n (cycle walking,
/// Black and Rogaway 2002; fewer than four rounds on average).
class KeyedPermutation {
 public:
  /// n >= 1.
  KeyedPermutation(std::int64_t n, std::uint64_t key);
  /// i in [0, n).
  std::int64_t operator()(std::int64_t i) const;

 private:
  std::int64_t n_;
  std::uint64_t key_;
  int half_bits_ = 1;
};

}  // namespace moesaic::data
