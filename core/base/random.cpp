#include "core/base/random.h"

// The compiler may not fuse a*b+c here: the same bits are promised on every machine.
#pragma GCC optimize("fp-contract=off")

#include "core/base/random_math.h"

namespace moesaic {

std::array<std::uint32_t, 4> philox(std::uint64_t key,
                                    std::uint64_t counter_low,
                                    std::uint64_t counter_high) noexcept {
  const random_math::Words w = random_math::philox(key, counter_low, counter_high);
  return {w.word[0], w.word[1], w.word[2], w.word[3]};
}

std::uint64_t hash_name(std::string_view name) noexcept {
  std::uint64_t h = 0xcbf29ce484222325ULL;
  for (const char c : name)
    h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return h;
}

std::uint64_t mix64(std::uint64_t x) noexcept {
  return random_math::mix64(x);
}
double portable_log(double x) noexcept {
  return random_math::portable_log(x);
}
double portable_exp(double x) noexcept {
  return random_math::portable_exp(x);
}
double uniform(std::uint64_t key, std::uint64_t index) noexcept {
  return random_math::uniform(key, index);
}
double standard_normal(std::uint64_t key, std::uint64_t index) noexcept {
  return random_math::standard_normal(key, index);
}

}  // namespace moesaic
