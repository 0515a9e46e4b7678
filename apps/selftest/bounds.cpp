#include "apps/selftest/bounds.h"

#include <algorithm>
#include <cmath>

namespace moesaic::apps::selftest {

DifferenceBounds bounds_for(const config::Config& config, DType compute, int steps) {
  if (compute == DType::f64) return {1e-9, 1e-7, 1e-7};
  constexpr double kRoundingsOfLayer = 16, kSafety = 6;
  const double unit = std::ldexp(1.0, compute == DType::bf16 ? -9 : -24);
  const auto layers = static_cast<double>(config.model.num_hidden_layers +
                                          config.model.mtp.num_nextn_predict_layers + 1);
  const double first = kSafety * unit * std::sqrt(2 * kRoundingsOfLayer * layers);
  return {first, first * 2 * std::max(1, steps - 1), 2 * std::sqrt(first)};
}

}  // namespace moesaic::apps::selftest
