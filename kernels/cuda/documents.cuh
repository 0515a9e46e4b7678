#pragma once
#include <cstdint>

namespace moesaic::cuda {

/// Document boundaries on the device, 0 = cu[0] <= ... <= cu[count] = T.
struct Documents {
  const std::int32_t* cu;
  std::int64_t count;

  __device__ std::int64_t begin(std::int64_t n) const { return cu[n]; }
  __device__ std::int64_t end(std::int64_t n) const { return cu[n + 1]; }
  /// The document that holds token t: the last one that begins at or before it.
  __device__ std::int64_t of_token(std::int64_t t) const {
    std::int64_t low = 0, high = count;
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (cu[middle] <= t ? low : high) = middle;
    }
    return low;
  }
};

}  // namespace moesaic::cuda
