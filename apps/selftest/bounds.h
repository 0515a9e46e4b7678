#pragma once
#include "core/base/dtype.h"
#include "core/config/config.h"

namespace moesaic::apps::selftest {

/// What a layout may differ from one rank by (comparison.h says how it is measured).
struct DifferenceBounds {
  double first = 0;    ///< losses, norm and gradients of the first step
  double later = 0;    ///< losses and norms of the later steps
  double weights = 0;  ///< after the last step
};

/// f64: 1e-9, 1e-7, 1e-7, far above rounding and far below what any wrong sum would do.
///
/// Narrower types, with u their unit roundoff (f32 2^-24, bf16 2^-9) and n = 2 * 16 * (layers + 1) roundings one after the
/// other through forward and backward, about 16 a layer and pass (norms, projections, attention, experts, sums):
///
///   first    6 u sqrt(n): roundings of different sums are independent, so they add up like a random walk
///   later    that times 2 (step - 1), steps building on each other's weights, for the last one
///   weights  2 sqrt(first): AdamW and Muon forget sizes. An element (a singular direction) whose gradient is below the
///            noise comes out in full size and any direction; where sizes are spread evenly down to zero, a share of
///            `first` of them is, each wrong by at most twice its step. Root mean square over the tensor, relative to its
///            movement.
DifferenceBounds bounds_for(const config::Config& config, DType compute, int steps);

}  // namespace moesaic::apps::selftest
