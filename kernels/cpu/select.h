#pragma once
// Exact selection of the k largest numbers of a row, for every op that chooses.
#include <bit>
#include <cstdint>
#include <type_traits>

namespace moesaic::cpu {

template <class A>
using order_key_t = std::conditional_t<sizeof(A) == 8, std::uint64_t, std::uint32_t>;

/// Unsigned integer with the order of the floats: NaN counts as -inf, -0 equals +0.
template <class A>
inline order_key_t<A> order_key(A x) noexcept {
  using U = order_key_t<A>;
  constexpr int kSign = 8 * sizeof(U) - 1;
  const U minus_infinity =
      static_cast<U>(~(sizeof(A) == 8 ? U(0xfff0000000000000ULL) : U(0xff800000U)));
  const U u = std::bit_cast<U>(x + A(0));  // -0 + 0 = +0
  const U key = (u >> kSign) != 0 ? static_cast<U>(~u) : static_cast<U>(u | (U(1) << kSign));
  return x == x ? key : minus_infinity;
}

/// Writes the indices of the min(k, n) largest of values[0..n) to out, ascending (n < 2^31), and
/// returns how many. Among equal values the lower index wins; NaN counts as -inf, -0 equals +0.
/// `keys` is scratch of 2 n numbers.
///
/// Radix selection from the top byte: only the candidates of the boundary bucket go on to the next
/// byte, so the cost is about two passes over n, whatever k. One last pass in index order makes the
/// result ascending and applies the tie rule.
template <class A>
inline std::int64_t select_largest(
    const A* values, std::int64_t n, std::int64_t k, std::int32_t* out, order_key_t<A>* keys) {
  using U = order_key_t<A>;
  if (k >= n) {
    for (std::int64_t i = 0; i < n; ++i)
      out[i] = static_cast<std::int32_t>(i);
    return n;
  }
  if (k <= 0) return 0;
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i)
    keys[i] = order_key(values[i]);
  const U* candidates = keys;
  U* survivors = keys + n;
  std::int64_t count = n, wanted = k;  // the boundary is the wanted-th largest of the candidates
  U boundary = 0;
  for (int shift = 8 * static_cast<int>(sizeof(U)) - 8; shift >= 0; shift -= 8) {
    // Four histograms, because neighbours in one bucket would wait for each other's increment.
    std::uint32_t histogram[4][256] = {};
    std::int64_t h = 0;
    for (; h + 4 <= count; h += 4) {
      for (int j = 0; j < 4; ++j)
        ++histogram[j][(candidates[h + j] >> shift) & 0xffU];
    }
    for (; h < count; ++h)
      ++histogram[0][(candidates[h] >> shift) & 0xffU];
    const auto bucket = [&](int d) {
      return static_cast<std::int64_t>(histogram[0][d]) + histogram[1][d] + histogram[2][d] +
             histogram[3][d];
    };
    int digit = 255;
    while (bucket(digit) < wanted)
      wanted -= bucket(digit--);
    boundary |= static_cast<U>(digit) << shift;
    const std::int64_t in_bucket = bucket(digit);
    if (in_bucket != count && shift != 0) {
      std::int64_t m = 0;  // in place from the second round on: m never overtakes i
      for (std::int64_t i = 0; i < count; ++i) {
        const U key = candidates[i];
        survivors[m] = key;
        m += static_cast<int>(((key >> shift) & 0xffU) == static_cast<U>(digit));
      }
      candidates = survivors;
      count = in_bucket;
    }
  }
  // `wanted` of the keys equal to the boundary are taken, those of lowest index.
  // Without branches on the data: which keys win is as good as random.
  std::int64_t written = 0;
  for (std::int64_t i = 0; written < k; ++i) {
    const auto equal =
        static_cast<std::int64_t>(keys[i] == boundary) & static_cast<std::int64_t>(wanted > 0);
    out[written] = static_cast<std::int32_t>(i);
    written += static_cast<std::int64_t>(keys[i] > boundary) | equal;
    wanted -= equal;
  }
  return k;
}

}  // namespace moesaic::cpu
