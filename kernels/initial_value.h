#pragma once
// One element of InitialValues, for the host and for CUDA; see core/base/random_math.h for what its includers must do.
// Fused multiply-adds are written out, so that both fuse the same ones.
#include "core/base/random_math.h"
#include "kernels/ops/initial_values.h"

namespace moesaic::random_math {

/// The index in the whole tensor of element i of y.
MOESAIC_HOST_DEVICE static inline std::uint64_t whole_index(const InitialValues::Index& y,
                                                            std::uint64_t i) noexcept {
  std::uint64_t at = y.first;
  for (int d = 0; d + 1 < y.rank; ++d) {
    at += i % y.extent[d] * y.stride[d];
    i /= y.extent[d];
  }
  return at + i * y.stride[y.rank - 1];
}

MOESAIC_HOST_DEVICE static inline double initial_value(
    InitialKind kind, double a, double b, std::uint64_t key, std::uint64_t index) noexcept {
  switch (kind) {
    case InitialKind::zeros:
      return 0.0;
    case InitialKind::ones:
      return 1.0;
    case InitialKind::normal:
      for (std::uint64_t attempt = 0;; ++attempt) {
        const double x = standard_normal(mix64(key + attempt), index);
        if (std::abs(x) <= 3.0) return std::fma(a, x, b);
      }
    case InitialKind::uniform:
      return std::fma(b - a, uniform(key, index), a);
    case InitialKind::log_uniform:
      return portable_log(std::fma(b - a, uniform(key, index), a));
    case InitialKind::inverse_softplus: {
      const double low = portable_log(a);
      const double dt = portable_exp(std::fma(portable_log(b) - low, uniform(key, index), low));
      const double at_least = dt < 1e-4 ? 1e-4 : dt;
      return at_least + portable_log(1.0 - portable_exp(-at_least));
    }
  }
  return 0.0;
}

}  // namespace moesaic::random_math
