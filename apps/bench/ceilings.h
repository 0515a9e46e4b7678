#pragma once
#include <functional>

#include "kernels/backend.h"

namespace moesaic::bench {

/// What the device can do at most, taken anew in every run: rates are judged by shares of it.
struct Ceilings {
  double bytes_per_second = 0;  ///< a copy of 2 GiB within the device, bytes read and bytes written
  double flops_per_second =
      0;  ///< the library's bf16 product of two 8192 x 8192 matrices, f32 sums, random data
};
/// CUDA only; takes and gives back 5 GiB. The median of several runs.
Ceilings measure_ceilings(Device device);

/// The larger of the shares of the two ceilings that a piece of work of this length reaches.
double share_of_ceiling(const OpCost& cost, double seconds, const Ceilings& ceilings);

/// Median time of one call on the device's own clock, at least `samples` samples of enough calls to outweigh the clock's
/// grain.
double device_seconds(BackendOwner& owner,
                      const std::function<void(Backend&)>& call,
                      int samples = 30);

}  // namespace moesaic::bench
