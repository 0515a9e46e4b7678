#pragma once
// The arithmetic of core/base/random.h, for the host and for CUDA kernels: one source, so that both draw the same bits.
// Whoever includes this must keep the compiler from fusing a*b+c (random.cpp and the kernels that draw do); everything
// has internal linkage, so that differently compiled copies cannot meet.
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define MOESAIC_HOST_DEVICE __host__ __device__
#else
#define MOESAIC_HOST_DEVICE
#endif

namespace moesaic::random_math {

struct Words {
  std::uint32_t word[4];
};

MOESAIC_HOST_DEVICE static inline Words philox(std::uint64_t key,
                                               std::uint64_t counter_low,
                                               std::uint64_t counter_high) noexcept {
  std::uint32_t c0 = static_cast<std::uint32_t>(counter_low),
                c1 = static_cast<std::uint32_t>(counter_low >> 32);
  std::uint32_t c2 = static_cast<std::uint32_t>(counter_high),
                c3 = static_cast<std::uint32_t>(counter_high >> 32);
  std::uint32_t k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = 0xD2511F53ULL * c0, p1 = 0xCD9E8D57ULL * c2;
    c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<std::uint32_t>(p1);
    c3 = static_cast<std::uint32_t>(p0);
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return {{c0, c1, c2, c3}};
}

MOESAIC_HOST_DEVICE static inline std::uint64_t mix64(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// x = m 2^e with m in [sqrt(1/2), sqrt(2)), log m = 2 artanh((m-1)/(m+1)) by its series.
MOESAIC_HOST_DEVICE static inline double portable_log(double x) noexcept {
  auto bits = std::bit_cast<std::uint64_t>(x);
  int e = static_cast<int>((bits >> 52) & 0x7ff) - 1023;
  bits = (bits & 0x000fffffffffffffULL) | 0x3ff0000000000000ULL;
  auto m = std::bit_cast<double>(bits);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    ++e;
  }
  const double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  double sum = 0.0;
  for (int k = 23; k >= 1; k -= 2)
    sum = sum * z + 1.0 / k;
  return 2.0 * s * sum + e * 0.6931471805599453;
}

// x = n log 2 + r, |r| <= log(2)/2; e^r by its Taylor series, 2^n through the exponent bits.
MOESAIC_HOST_DEVICE static inline double portable_exp(double x) noexcept {
  const double n =
      static_cast<double>(static_cast<std::int64_t>(x * 1.4426950408889634 + (x < 0 ? -0.5 : 0.5)));
  const double r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
  double sum = 1.0;
  for (int k = 18; k >= 1; --k)
    sum = 1.0 + sum * r / k;
  return sum * std::bit_cast<double>(static_cast<std::uint64_t>(static_cast<std::int64_t>(n) + 1023)
                                     << 52);
}

MOESAIC_HOST_DEVICE static inline double uniform(std::uint64_t key, std::uint64_t index) noexcept {
  const Words r = philox(key, index, 0);
  const std::uint64_t bits = (static_cast<std::uint64_t>(r.word[0]) << 32 | r.word[1]) >> 11;
  return static_cast<double>(bits) * 0x1.0p-53;
}

template <std::size_t N>
MOESAIC_HOST_DEVICE static inline double poly(const double (&c)[N], double r) noexcept {
  double v = c[N - 1];
  for (std::size_t i = N - 1; i-- > 0;)
    v = v * r + c[i];
  return v;
}

// Wichura's AS 241 (PPND16), coefficients in rising order.
MOESAIC_HOST_DEVICE static inline double standard_normal(std::uint64_t key,
                                                         std::uint64_t index) noexcept {
  const double p = uniform(key, index) + 0x1.0p-54;  // never 0 or 1
  const double q = p - 0.5;
  if (std::abs(q) <= 0.425) {
    constexpr double kA[] = {3.3871328727963666080e0,
                             1.3314166789178437745e+2,
                             1.9715909503065514427e+3,
                             1.3731693765509461125e+4,
                             4.5921953931549871457e+4,
                             6.7265770927008700853e+4,
                             3.3430575583588128105e+4,
                             2.5090809287301226727e+3};
    constexpr double kB[] = {1.0,
                             4.2313330701600911252e+1,
                             6.8718700749205790830e+2,
                             5.3941960214247511077e+3,
                             2.1213794301586595867e+4,
                             3.9307895800092710610e+4,
                             2.8729085735721942674e+4,
                             5.2264952788528545610e+3};
    const double r = 0.180625 - q * q;
    return q * poly(kA, r) / poly(kB, r);
  }
  double r = std::sqrt(-portable_log(q < 0 ? p : 1.0 - p));
  double x = 0;
  if (r <= 5.0) {
    constexpr double kC[] = {1.42343711074968357734e0,
                             4.63033784615654529590e0,
                             5.76949722146069140550e0,
                             3.64784832476320460504e0,
                             1.27045825245236838258e0,
                             2.41780725177450611770e-1,
                             2.27238449892691845833e-2,
                             7.74545014278341407640e-4};
    constexpr double kD[] = {1.0,
                             2.05319162663775882187e0,
                             1.67638483018380384940e0,
                             6.89767334985100004550e-1,
                             1.48103976427480074590e-1,
                             1.51986665636164571966e-2,
                             5.47593808499534494600e-4,
                             1.05075007164441684324e-9};
    r -= 1.6;
    x = poly(kC, r) / poly(kD, r);
  } else {
    constexpr double kE[] = {6.65790464350110377720e0,
                             5.46378491116411436990e0,
                             1.78482653991729133580e0,
                             2.96560571828504891230e-1,
                             2.65321895265761230930e-2,
                             1.24266094738807843860e-3,
                             2.71155556874348757815e-5,
                             2.01033439929228813265e-7};
    constexpr double kF[] = {1.0,
                             5.99832206555887937690e-1,
                             1.36929880922735805310e-1,
                             1.48753612908506148525e-2,
                             7.86869131145613259100e-4,
                             1.84631831751005468180e-5,
                             1.42151175831644588870e-7,
                             2.04426310338993978564e-15};
    r -= 5.0;
    x = poly(kE, r) / poly(kF, r);
  }
  return q < 0 ? -x : x;
}

}  // namespace moesaic::random_math
