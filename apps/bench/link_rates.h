#pragma once
#include "core/base/tensor.h"

namespace moesaic::bench {

/// Rates of copies between (pinned) host memory and a device, bytes per second.
struct LinkRates {
  double up = 0, down = 0;            ///< to the device and from it, alone
  double up_both = 0, down_both = 0;  ///< the two at the same time
};
/// The median of several copies of 1 GiB; takes and gives back 2 GiB on either side. On the CPU: copies of 64 MiB in memory by
/// two threads.
LinkRates measure_links(Device device);

}  // namespace moesaic::bench
